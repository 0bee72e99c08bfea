"""Policy <-> hwkv.* keys of a GGUF file.

Embedding writes a new file. All that the source holds is copied as bytes: its other keys
with their types and order, the tensor infos, and the tensor data. Only the counts at the
start and the padding before the data can differ. The file is never held in memory.
"""

import errno
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from gguf.constants import GGUFValueType
from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from ..base.atomic import check_target, replacing_together
from ..base.formats import MAX_DEPTH, parse, parse_json, show, to_line
from ..errors import HwkvError
from ..policy.policy import CARRIERS, MAX_WINDOW, VERSION, Number, Policy, PolicyModel, Tokens, Version, check_size
from .file import MAGIC, SHARD_NAME, GGUFFile, open_first_shard, shard_name
from .file import Field as KeyField
from .geometry import ModelGeometry

# The same names stand in native/src/llama-hwkv-policy.cpp; a test compares them. We write the types that are named
# here. Readers take integers of any type: other writers of GGUF choose the type that they like.
PREFIX = "hwkv."
KEY_VERSION = "hwkv.version"  # u32
KEY_N_SINK = "hwkv.n_sink"  # u32
KEY_LAYERS = "hwkv.layers"  # i32[]
KEY_HEAD_COUNTS = "hwkv.head_counts"  # i32[], windows per listed layer
KEY_WINDOWS = "hwkv.windows"  # i32[], rows of the listed layers one after another, -1 is full
KEY_SUMMARY = "hwkv.summary"  # string, for people
KEY_MODEL = "hwkv.model"  # string, JSON; optional
KEY_PROVENANCE = "hwkv.provenance"  # string, JSON; optional

KEYS = (KEY_VERSION, KEY_N_SINK, KEY_LAYERS, KEY_HEAD_COUNTS, KEY_WINDOWS, KEY_SUMMARY, KEY_MODEL, KEY_PROVENANCE)

FULL_WINDOW = -1
MAX_ENTRIES = 65536  # of an array; the C++ reader has the same limit
CHUNK_BYTES = 64 * 2**20
PROGRESS_BYTES = 512 * 2**20  # files below are copied too fast for a progress bar


def embed(
    model_path: str | Path,
    policy: Policy,
    out_path: str | Path,
    *,
    force: bool = False,
    link_shards: bool = False,
    progress: bool = False,
) -> list[Path]:
    """Writes a copy of a model with the policy embedded. Returns the paths written.

    A policy that the source has embedded already is replaced. Of a split model any shard
    may be given; the keys go into the first, the others are copied (or hard-linked, with
    link_shards), and out_path gives the prefix of all names.
    HwkvError if the policy does not fit, an output exists (without force) or is an input,
    or anything cannot be read or written. After that, or after an interrupt at any moment, the output is as it was
    before; of a split model every shard, except for what `replacing_together` says of a killed process.
    """
    geometry = ModelGeometry.from_gguf(model_path)
    policy.check(geometry)
    first, sources = open_first_shard(model_path)
    with first, ExitStack() as stack:
        targets = _target_paths(Path(out_path), len(sources))
        for target in targets:
            for source in sources:
                _refuse_same(source, target)
            check_target(target, force)
        others = [stack.enter_context(GGUFFile(path)) for path in sources[1:]]
        for no, shard in enumerate(others, 1):
            if shard.get("split.no") != no or shard.get("split.count") != len(sources):
                raise HwkvError(f"{shard.path}: is not shard {no + 1} of {len(sources)}")
        for shard in (first, *others):
            if shard.tensors and not shard.has_data:
                raise HwkvError(
                    f"{shard.path}: truncated: it lists {len(shard.tensors)} tensors, but ends with its header"
                    f" at {shard.size:,} bytes"
                )

        total = sum(shard.size for shard in (first, *others))
        bar = stack.enter_context(
            tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                desc=targets[0].name,
                disable=None if progress and total > PROGRESS_BYTES else True,
                leave=False,
            )
        )
        with replacing_together(force) as add:
            out = add(targets[0])
            assert out is not None  # nothing to link to was given
            _write_with_policy(first, _encode(policy, geometry), out, bar)
            _check_written(out, first, policy)
            for shard, target in zip(others, targets[1:]):
                file = add(target, link_to=shard.path if link_shards else None)
                if file is not None:
                    _copy_bytes(shard, 0, shard.size, file, bar)
    return targets


def read_policy(path: str | Path) -> Policy | None:
    """The policy embedded in a GGUF file (or split model), or None. HwkvError if its keys are damaged."""
    file, _ = open_first_shard(path)
    with file:
        return _decode(file)


def _carried_policy(path: str | Path) -> Policy:
    policy = read_policy(path)
    if policy is None:
        raise HwkvError(f"{path}: has no embedded policy")
    return policy


CARRIERS[MAGIC] = _carried_policy  # for Policy.load


def chosen_policy(model: str | Path, choice: str | Path | None = None) -> Policy | None:
    """The Policy that a model is to be served with, checked, or None for full KV.

    choice: a policy file, "embedded" for the model's own, "off", or None for the model's own if it has one.
    HwkvError if the policy cannot be read, is not there, or does not fit the model.
    """
    geometry = ModelGeometry.from_gguf(model)
    if choice == "off":
        return None
    if choice is None:
        policy = read_policy(model)
    else:
        policy = _carried_policy(model) if choice == "embedded" else Policy.load(choice)
    if policy is not None:
        policy.check(geometry, model if choice in (None, "embedded") else choice)
    return policy


def has_policy(file: GGUFFile) -> bool:
    """True if an open GGUFFile has a key of a policy: without the others it is a damaged one."""
    return any(key in file.fields for key in KEYS)


# hwkv.* keys

WindowNumber = Annotated[Tokens | Literal[-1], Field(description=f"{FULL_WINDOW} for full or 1 to {MAX_WINDOW} tokens")]


class PolicyKeys(BaseModel):
    """The keys that hold numbers."""

    model_config = ConfigDict(alias_generator=lambda name: PREFIX + name)

    version: Version
    n_sink: Number = 0
    layers: list[Number]
    head_counts: list[Annotated[int, Field(strict=True, ge=1, le=MAX_ENTRIES)]]
    windows: list[WindowNumber]


def _encode(policy: Policy, geometry: ModelGeometry) -> list[bytes]:
    """The keys of a policy, as (key, bytes) in the order they are written."""
    rows = policy.layers.values()
    windows = [FULL_WINDOW if w is None else w for row in rows for w in row]
    keys = [
        _scalar(KEY_VERSION, VERSION),
        _scalar(KEY_N_SINK, policy.n_sink),
        _array(KEY_LAYERS, list(policy.layers)),
        _array(KEY_HEAD_COUNTS, [len(row) for row in rows]),
        _array(KEY_WINDOWS, windows),
        _text(KEY_SUMMARY, policy.summary(geometry)),
    ]
    if policy.model is not None:
        keys.append(_object(KEY_MODEL, policy.model))
    if policy.provenance is not None:
        keys.append(_object(KEY_PROVENANCE, policy.provenance))
    return keys


def _decode(file: GGUFFile) -> Policy | None:
    if not has_policy(file):
        return None
    numbers = parse(PolicyKeys, _numbers(file), file.path)
    layers, counts, windows = numbers.layers, numbers.head_counts, numbers.windows
    if len(counts) != len(layers) or sum(counts) != len(windows):
        raise HwkvError(
            f"{file.path}: key '{KEY_HEAD_COUNTS}' has {len(counts)} counts that sum to {sum(counts)},"
            f" {len(layers)} that sum to {len(windows)} expected"
        )
    rows: dict[int, tuple[int | None, ...]] = {}
    pos = 0
    for i, (il, n) in enumerate(zip(layers, counts)):
        if il in rows:
            raise HwkvError(f"{file.path}: key '{KEY_LAYERS}[{i}]' lists layer {il} a second time")
        rows[il] = tuple(None if w == FULL_WINDOW else w for w in windows[pos : pos + n])
        pos += n
    model = _read_object(file, KEY_MODEL)
    if model is not None:
        model = parse(PolicyModel, model, f"{file.path}: key '{KEY_MODEL}'")
    return Policy(rows, numbers.n_sink, model, _read_object(file, KEY_PROVENANCE))


def _numbers(file: GGUFFile) -> dict[str, Any]:
    """{key: value} of the keys that are there."""
    values = {}
    for key in (KEY_VERSION, KEY_N_SINK, KEY_LAYERS, KEY_HEAD_COUNTS, KEY_WINDOWS):
        if key in file.fields:
            length = file.fields[key].length
            if length > MAX_ENTRIES:
                raise HwkvError(f"{file.path}: key '{key}' has {length} entries, at most {MAX_ENTRIES} expected")
            values[key] = file.get(key)
    return values


def _read_object(file: GGUFFile, key: str) -> dict[str, Any] | None:
    """The JSON object that is the text of a key, or None."""
    field = file.fields.get(key)
    if field is None:
        return None
    source = f"{file.path}: key '{key}'"
    if field.type != GGUFValueType.STRING:
        raise HwkvError(f"{source} is of another type, a string expected")
    data = file.raw(field.value + 8, field.end).split(b"\0")[0]  # llama.cpp's reader ends a text at its first NUL, too
    check_size(len(data), source)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HwkvError(f"{source}: not JSON: byte {error.start} is not UTF-8 text") from None
    value = parse_json(text, source, MAX_DEPTH - 1)  # in a policy file it stands one level deeper
    if value is not None and not isinstance(value, dict):
        raise HwkvError(f"{source}: holds {show(value)}, a JSON object expected")
    return value


def _scalar(key: str, value: int) -> bytes:
    return _key(key, GGUFValueType.UINT32) + struct.pack("<I", value)


def _array(key: str, values: list[int]) -> bytes:
    return _key(key, GGUFValueType.ARRAY) + struct.pack(f"<IQ{len(values)}i", GGUFValueType.INT32, len(values), *values)


def _object(key: str, value: Any) -> bytes:
    text = to_line(value)
    check_size(len(text.encode()), f"policy: key '{key}'")
    return _text(key, text)


def _text(key: str, value: str) -> bytes:
    return _key(key, GGUFValueType.STRING) + _string(value)


def _key(key: str, type_: GGUFValueType) -> bytes:
    return _string(key) + struct.pack("<I", type_)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


# files


def _write_with_policy(source: GGUFFile, added: list[bytes], out: BinaryIO, bar: tqdm) -> None:
    kept = _kept(source)
    header = [MAGIC, struct.pack("<IQQ", source.version, source.n_tensors, len(kept) + len(added))]
    header += [source.raw(field.start, field.end) for field in kept]
    header += added
    header.append(source.raw(source.kv_end, source.infos_end))
    n_bytes = sum(map(len, header))
    out.writelines(header)
    if source.has_data or source.size == source.data_start:
        # up to 2 GiB, which llama.cpp takes: a hole in the file, neither in memory nor on the disk
        out.truncate(n_bytes + -n_bytes % source.alignment)
        out.seek(0, os.SEEK_END)
    bar.update(min(source.size, source.data_start))
    if source.has_data:
        _copy_bytes(source, source.data_start, source.size, out, bar)


def _check_written(out: BinaryIO, source: GGUFFile, policy: Policy) -> None:
    """Reads the new header back: what a crash of ours would damage must not reach the target's name."""
    out.flush()
    with GGUFFile(out.name) as written:
        equal = (
            _decode(written) == policy
            and written.tensors == source.tensors
            and [written.raw(x.start, x.end) for x in _kept(written)]
            == [source.raw(x.start, x.end) for x in _kept(source)]
            and (not source.has_data or written.size - written.data_start == source.size - source.data_start)
        )
    if not equal:
        raise HwkvError(f"{source.path}: the copy did not come out equal; nothing was written")


def _kept(file: GGUFFile) -> list[KeyField]:
    return [field for field in file.fields.values() if not field.key.startswith(PREFIX)]


def _copy_bytes(source: GGUFFile, start: int, end: int, out: BinaryIO, bar: tqdm) -> None:
    """Copies the bytes [start, end) of an open GGUFFile's file to the end of `out`, in the kernel where it can."""
    out.flush()
    with open(source.path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != source.size:
            raise HwkvError(f"{source.path}: changed while it was read")
        in_kernel = hasattr(os, "copy_file_range")
        pos = start
        while pos < end:
            want = min(CHUNK_BYTES, end - pos)
            n = 0
            if in_kernel:
                try:
                    n = os.copy_file_range(file.fileno(), out.fileno(), want, pos)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                        raise
                in_kernel = n > 0
            if n == 0:
                data = os.pread(file.fileno(), min(want, 2**23), pos)
                n = len(data)
                if n == 0:
                    raise HwkvError(f"{source.path}: truncated while it was read: {source.size:,} bytes expected")
                view = memoryview(data)
                while view:
                    view = view[os.write(out.fileno(), view) :]
            pos += n
            bar.update(n)
        out.seek(0, os.SEEK_END)


def _target_paths(path: Path, n_shards: int) -> list[Path]:
    if n_shards == 1:
        return [path]
    match = SHARD_NAME.match(path.name)
    if match and (int(match["no"]) != 1 or int(match["count"]) != n_shards):
        raise HwkvError(
            f"{path}: the model has {n_shards} shards: give a name that ends in -00001-of-{n_shards:05d}.gguf,"
            " or a prefix"
        )
    prefix = match["prefix"] if match else path.name.removesuffix(".gguf")
    return [path.with_name(shard_name(prefix, no, n_shards)) for no in range(n_shards)]


def _refuse_same(source: Path, target: Path) -> None:
    try:
        same = os.path.samefile(source, target)
    except OSError:
        same = False
    if same:
        raise HwkvError(f"{target}: is the input; embedding writes a new file")
