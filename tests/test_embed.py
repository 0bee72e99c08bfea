"""Embedding a policy into a GGUF: what must stay the same, and what must never happen to anybody's files."""

import errno
import hashlib
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import write_gguf
from gguf import GGUFReader, GGUFValueType

import hwkv_llamacpp.gguf.embed as embed_module
from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.gguf.embed import embed, read_policy
from hwkv_llamacpp.gguf.file import GGUFFile
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

SHAPE = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
ROWS = {0: [None, 64], 1: [16, 2**31 - 1]}


def make_model(path, alignment=None, **more):
    """A complete small model with keys of every type, odd sizes, and hostile names."""
    rng = np.random.default_rng(0)
    return write_gguf(
        path,
        "llama",
        {
            **SHAPE,
            "general.name": "tïny",
            "x.i8": (-3, GGUFValueType.INT8),
            "x.u16": (65535, GGUFValueType.UINT16),
            "x.u64": (2**64 - 1, GGUFValueType.UINT64),
            "x.i64": (-(2**63), GGUFValueType.INT64),
            "x.f64": (1e-300, GGUFValueType.FLOAT64),
            "x.flag": False,
            "x.empty": "",
            "x.texts": ["a", "", "日本語"],
            "x.flags": [True, False],
            "x.floats": [0.1, -0.0],
            "tokenizer.ggml.tokens": [f"token {i}" for i in range(1000)],
            **more,
        },
        {
            "token_embd.weight": rng.random((7, 64), np.float32),
            "output.weight": rng.random((3, 64)).astype(np.float16),
            "blk.0.odd.weight": rng.random(13, np.float32),
        },
        alignment,
    )


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model.gguf")


@pytest.fixture
def policy(model):
    return Policy(ROWS, model=ModelGeometry.from_gguf(model).describe(), provenance={"method": "test", "ü": [1, 0.1]})


def refused(function, *arguments, **options):
    with pytest.raises(HwkvError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder):
    """{file name: hash} of a folder: what must not change, and nothing may be left in."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def assert_same_but_hwkv(before, after):
    """By the official reader: the same keys in the same order with the same types, hwkv.* after them, the same
    tensors."""
    old, new = GGUFReader(before), GGUFReader(after)
    others = [key for key in new.fields if not key.startswith(("hwkv.", "GGUF."))]
    assert others == [key for key in old.fields if not key.startswith(("hwkv.", "GGUF."))]
    assert [key for key in new.fields if not key.startswith("GGUF.")] == others + [
        key for key in new.fields if key.startswith("hwkv.")
    ]
    for key in others:
        assert new.fields[key].types == old.fields[key].types
        assert b"".join(bytes(part) for part in new.fields[key].parts) == b"".join(
            bytes(part) for part in old.fields[key].parts
        )
    assert new.fields["GGUF.version"].contents() == old.fields["GGUF.version"].contents()
    assert [(t.name, t.tensor_type, list(t.shape)) for t in new.tensors] == [
        (t.name, t.tensor_type, list(t.shape)) for t in old.tensors
    ]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(new.tensors, old.tensors))
    assert new.data_offset % new.alignment == 0
    assert Path(after).read_bytes()[new.data_offset :] == Path(before).read_bytes()[old.data_offset :]


# what stays the same


def test_only_hwkv_keys_are_added(model, policy, tmp_path):
    before = contents(tmp_path)
    out = tmp_path / "out.gguf"
    assert embed(model, policy, out) == [out]
    assert_same_but_hwkv(model, out)
    after = contents(tmp_path)
    after.pop("out.gguf")
    assert after == before


def test_keys_as_specified(model, policy, tmp_path):
    out = embed(model, policy, tmp_path / "out.gguf")[0]
    fields = {key: field for key, field in GGUFReader(out).fields.items() if key.startswith("hwkv.")}
    array = [GGUFValueType.ARRAY, GGUFValueType.INT32]
    assert {key: (field.types, field.contents()) for key, field in fields.items()} == {
        "hwkv.version": ([GGUFValueType.UINT32], 1),
        "hwkv.n_sink": ([GGUFValueType.UINT32], 0),
        "hwkv.layers": (array, [0, 1]),
        "hwkv.head_counts": (array, [2, 2]),
        "hwkv.windows": (array, [-1, 64, 16, 2**31 - 1]),
        "hwkv.summary": (
            [GGUFValueType.STRING],
            f"{policy.fingerprint(2)}: 3 of 4 KV heads in 2 layers windowed, 16 to 2147483647 tokens, n_sink 0",
        ),
        "hwkv.model": (
            [GGUFValueType.STRING],
            '{"architecture": "llama", "name": "tïny", "n_layer": 2, "fingerprint": "'
            + ModelGeometry.from_gguf(model).fingerprint
            + '"}',
        ),
        "hwkv.provenance": ([GGUFValueType.STRING], '{"method": "test", "ü": [1, 0.1]}'),
    }


def test_names_are_those_of_the_runtime():
    sources = sorted((Path(__file__).parents[1] / "native").glob("**/*.cpp"))
    native = set(re.findall(r'"(hwkv\.[a-z_]+)"', "\n".join(path.read_text() for path in sources)))
    ours = {value for name, value in vars(embed_module).items() if name.startswith("KEY_")}
    assert native and native - {"hwkv.policy"} <= ours
    assert ours - native <= {
        embed_module.KEY_SUMMARY,
        embed_module.KEY_MODEL,
        embed_module.KEY_PROVENANCE,
    }  # for people and Python


@pytest.mark.parametrize("alignment", [None, 1, 8, 64, 4096])
@pytest.mark.parametrize("name_length", range(8))
def test_any_alignment_and_padding(tmp_path, alignment, name_length):
    model = make_model(tmp_path / "model.gguf", alignment, **{"x.pad": "p" * name_length})
    out = embed(model, Policy(ROWS), tmp_path / "out.gguf")[0]
    assert_same_but_hwkv(model, out)


def test_extract_gives_back_the_bytes(model, policy, tmp_path):
    for number, kept in enumerate(
        (policy, Policy(ROWS), Policy({0: [None, None]}), Policy(), Policy({1: [1, 1]}, provenance={}))
    ):
        out = embed(model, kept, tmp_path / f"{number}.gguf")[0]
        assert read_policy(out) == kept
        assert read_policy(out).to_json() == kept.to_json()


def test_embedding_again_replaces(model, policy, tmp_path):
    once = embed(model, policy, tmp_path / "once.gguf")[0]
    twice = embed(once, Policy({0: [7, 7]}), tmp_path / "twice.gguf")[0]
    assert read_policy(twice) == Policy({0: [7, 7]})
    direct = embed(model, Policy({0: [7, 7]}), tmp_path / "direct.gguf")[0]
    assert twice.read_bytes() == direct.read_bytes()


def test_metadata_only(tmp_path):
    model = write_gguf(tmp_path / "meta.gguf", "llama", SHAPE)
    for size in (
        model.stat().st_size,
        model.stat().st_size - model.stat().st_size % 32 + 32,
    ):  # with and without padding
        os.truncate(model, size)
        out = embed(model, Policy(ROWS), tmp_path / "out.gguf", force=True)[0]
        assert read_policy(out) == Policy(ROWS)
        assert list(GGUFReader(out).fields)[:8] == list(GGUFReader(model).fields)[:8]


def test_bytes_after_the_last_tensor_are_kept(model, policy, tmp_path):
    with open(model, "ab") as file:
        file.write(b"more")
    out = embed(model, policy, tmp_path / "out.gguf")[0]
    assert out.read_bytes().endswith(b"more")
    assert_same_but_hwkv(model, out)


def test_copying_without_help_of_the_kernel(model, policy, tmp_path, monkeypatch):
    fast = embed(model, policy, tmp_path / "fast.gguf")[0]
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    slow = embed(model, policy, tmp_path / "slow.gguf")[0]
    assert slow.read_bytes() == fast.read_bytes()


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "mini_hybrid"])
def test_real_models(name, request, tmp_path):
    path = request.getfixturevalue(name)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    policy = uniform(ModelGeometry.from_gguf(path), 512)
    out = embed(path, policy, tmp_path / "out.gguf")[0]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert read_policy(out) == policy
    with GGUFFile(path) as old, GGUFFile(out) as new:
        assert new.tensors == old.tensors
        assert [new.raw(f.start, f.end) for f in new.fields.values()][: len(old.fields)] == [
            old.raw(f.start, f.end) for f in old.fields.values()
        ]
        with open(path, "rb") as a, open(out, "rb") as b:
            a.seek(old.data_start)
            b.seek(new.data_start)
            assert a.read() == b.read()


# llama.cpp's own programs on the result


@pytest.fixture
def program():
    """program(name, *words): runs a program of the unpatched build, or else of ours; returns what it prints."""

    def run(name, *words):
        try:
            try:
                path = native.binary(name, upstream=True)
            except HwkvError:
                path = native.binary(name)
        except HwkvError as error:
            pytest.skip(str(error))
        done = subprocess.run([path, *map(str, words)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.parametrize("name", ["mini_hybrid", "smollm2"])
def test_unpatched_llama_cpp_says_the_same(name, request, tmp_path):
    path = request.getfixturevalue(name)
    out = embed(path, uniform(ModelGeometry.from_gguf(path), 64), tmp_path / "out.gguf")[0]
    try:
        native.binary("llama-server", upstream=True)
    except HwkvError as error:
        pytest.skip(str(error))
    tokens = []
    for model in (path, out):
        with LlamaServer(ServerOptions(model, n_ctx=256, n_parallel=1, n_threads=1, upstream=True)) as server:
            tokens.append(
                server.post(
                    "/completion",
                    {"prompt": "The capital of France is", "n_predict": 16, "temperature": 0, "return_tokens": True},
                )["tokens"]
            )
    assert tokens[0] == tokens[1] and len(tokens[0]) == 16


def test_policy_survives_quantizing_splitting_and_merging(mini_hybrid, program, tmp_path):
    policy = uniform(ModelGeometry.from_gguf(mini_hybrid), 64)
    out = embed(mini_hybrid, policy, tmp_path / "out.gguf")[0]
    program("llama-quantize", out, tmp_path / "q8_0.gguf", "q8_0", 2)
    program("llama-gguf-split", "--split", "--split-max-tensors", 40, out, tmp_path / "part")
    program("llama-gguf-split", "--merge", tmp_path / "part-00001-of-00003.gguf", tmp_path / "merged.gguf")
    for path in (tmp_path / "q8_0.gguf", tmp_path / "part-00003-of-00003.gguf", tmp_path / "merged.gguf"):
        assert read_policy(path).to_json() == policy.to_json()
        policy.check(ModelGeometry.from_gguf(path))
    again = embed(tmp_path / "part-00002-of-00003.gguf", Policy({3: [7] * 4}), tmp_path / "new")
    program("llama-gguf-split", "--merge", again[0], tmp_path / "merged-again.gguf")
    assert read_policy(tmp_path / "merged-again.gguf") == Policy({3: [7] * 4})


# split models


def make_split(folder, n=3):
    """A model of n shards, as llama-gguf-split writes them."""
    rng = np.random.default_rng(1)
    shards = []
    for no in range(n):
        shards.append(
            write_gguf(
                folder / f"big-{no + 1:05d}-of-{n:05d}.gguf",
                "llama",
                {
                    **(SHAPE if no == 0 else {}),
                    "split.no": (no, GGUFValueType.UINT16),
                    "split.count": (n, GGUFValueType.UINT16),
                    "split.tensors.count": (n, GGUFValueType.INT32),
                },
                {f"blk.{no}.weight": rng.random((5, 64), np.float32)},
            )
        )
    return shards


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("given", [0, 2])
def test_split_model(tmp_path, link, given):
    shards = make_split(tmp_path)
    written = embed(shards[given], Policy(ROWS), tmp_path / "new.gguf", link_shards=link)
    assert [path.name for path in written] == [f"new-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert_same_but_hwkv(shards[0], written[0])
    for old, new in zip(shards[1:], written[1:]):
        assert new.read_bytes() == old.read_bytes()
        assert os.path.samefile(old, new) == link
    assert all(read_policy(path) == Policy(ROWS) for path in written)
    assert len(list(tmp_path.iterdir())) == 6


def test_split_output_names(tmp_path):
    shards = make_split(tmp_path)
    (tmp_path / "d").mkdir()
    assert embed(shards[0], Policy(ROWS), tmp_path / "d" / shards[0].name)[2].name == shards[2].name
    assert refused(embed, shards[0], Policy(ROWS), tmp_path / "x-00002-of-00003.gguf") == (
        f"{tmp_path}/x-00002-of-00003.gguf: the model has 3 shards:"
        " give a name that ends in -00001-of-00003.gguf, or a prefix"
    )
    assert (
        refused(embed, shards[0], Policy(ROWS), tmp_path / "big")
        == f"{shards[0]}: is the input; embedding writes a new file"
    )


def test_split_model_with_a_shard_missing_or_wrong(tmp_path):
    shards = make_split(tmp_path)
    shards[1].write_bytes(shards[2].read_bytes())
    assert refused(embed, shards[0], Policy(ROWS), tmp_path / "new") == f"{shards[1]}: is not shard 2 of 3"
    shards[1].unlink()
    before = contents(tmp_path)
    assert (
        refused(embed, shards[0], Policy(ROWS), tmp_path / "new")
        == f"{shards[1]}: cannot read: No such file or directory"
    )
    assert contents(tmp_path) == before


class Interrupts:
    """Raises before or after the n-th call of a function of `os` that changes names."""

    NAMES = ("link", "replace", "rename", "unlink")

    def __init__(self, monkeypatch, n=None, after=False, error=KeyboardInterrupt):
        self.calls, self.n, self.after, self.error = 0, n, after, error
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, function):
        def call(*arguments, **options):
            self.calls += 1
            hit = self.calls == self.n
            if hit and not self.after:
                raise self.error
            try:
                return function(*arguments, **options)
            finally:
                if hit:
                    raise self.error

        return call


def no_links(*arguments, **options):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("can_link", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("old", ["all", "none", "some"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_split_model_interrupted_at_any_rename(tmp_path, monkeypatch, old, after, can_link):
    """All shards are as they were, or all are new: at every call that changes a name, and nothing else is left."""
    shards, newer = make_split(tmp_path), Policy({1: [32, 32]})
    names = [f"new-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    whole = {path.name: path.read_bytes() for path in embed(shards[0], newer, tmp_path / "new")}
    for name in names:
        (tmp_path / name).unlink()
    for i, name in enumerate(names):
        if old == "all" or old == "some" and i == 1:
            (tmp_path / name).write_bytes(b"old %d" % i)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    outcomes = set()
    for n in range(1, 100):
        with monkeypatch.context() as patch:
            if not can_link:
                patch.setattr(os, "link", no_links)
            interrupts = Interrupts(patch, n, after)
            if done := _tries(shards[0], newer, tmp_path / "new"):
                assert interrupts.calls < n
        now = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert now in (before, before | whole), n
        if done:
            break
        outcomes.add(now == before)
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)
            if name in before:
                (tmp_path / name).write_bytes(before[name])
    assert done and now == before | whole and True in outcomes
    assert n > (6 if old == "all" else 3)


def _tries(*arguments):
    """True if it was not interrupted."""
    try:
        embed(*arguments, force=True)
    except KeyboardInterrupt:
        return False
    return True


def test_split_model_whose_last_shard_cannot_take_its_name(tmp_path, monkeypatch):
    """As after an interrupt, and in one sentence."""
    shards = make_split(tmp_path)
    embed(shards[0], Policy(ROWS), tmp_path / "new")
    before, replace = contents(tmp_path), os.replace

    def refusing(source, target):
        if str(target).endswith("new-00003-of-00003.gguf"):
            raise OSError(errno.EIO, "Input/output error", str(source), None, str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    message = refused(embed, shards[0], Policy({1: [32, 32]}), tmp_path / "new", force=True)
    assert message == f"{tmp_path}/new-00003-of-00003.gguf: cannot write: Input/output error"
    assert contents(tmp_path) == before


def test_split_model_interrupted_twice(tmp_path, monkeypatch):
    """The second Ctrl-C, while the first is being undone."""
    shards = make_split(tmp_path)
    embed(shards[0], Policy(ROWS), tmp_path / "new")
    before, replace, calls = contents(tmp_path), os.replace, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) in (3, 4, 6):
            raise KeyboardInterrupt
        replace(*arguments)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embed(shards[0], Policy({1: [32, 32]}), tmp_path / "new", force=True)
    assert len(calls) > 6 and contents(tmp_path) == before


# what is refused


def test_policy_of_another_model(model, tmp_path):
    before = contents(tmp_path)
    assert (
        refused(embed, model, Policy({0: [1]}), tmp_path / "o")
        == "policy: layer 0 has 1 windows, the model has 2 KV heads there"
    )
    assert (
        refused(embed, model, Policy({9: [1, 1]}), tmp_path / "o")
        == "policy: lists layer 9, the model has layers 0 to 1"
    )
    assert refused(embed, model, Policy(model={"architecture": "qwen35"}), tmp_path / "o").startswith(
        "policy: made for another model"
    )
    assert contents(tmp_path) == before


def test_outputs_that_must_not_be_replaced(model, policy, tmp_path):
    taken, link, folder = tmp_path / "taken", tmp_path / "link.gguf", tmp_path / "folder"
    taken.write_text("mine")
    folder.mkdir()
    link.symlink_to(model)
    before = contents(tmp_path)
    assert refused(embed, model, policy, taken) == f"{taken}: exists already; --force replaces it"
    assert refused(embed, model, policy, model, force=True) == f"{model}: is the input; embedding writes a new file"
    assert refused(embed, model, policy, link, force=True) == f"{link}: is the input; embedding writes a new file"
    assert refused(embed, link, policy, model, force=True) == f"{model}: is the input; embedding writes a new file"
    assert refused(embed, model, policy, folder, force=True) == f"{folder}: cannot write: it is a folder"
    assert refused(embed, model, policy, "/dev/null", force=True) == "/dev/null: cannot write: it is not a regular file"
    assert refused(embed, model, policy, taken / "below") == f"{taken}/below: cannot write: Not a directory"
    assert (
        refused(embed, model, policy, tmp_path / "no" / "out")
        == f"{tmp_path}/no/out: cannot write: No such file or directory"
    )
    assert refused(embed, model, policy, tmp_path / ("n" * 300)).endswith("cannot write: File name too long")
    assert contents(tmp_path) == before


def test_force(model, policy, tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("old")
    embed(model, policy, out, force=True)
    assert read_policy(out) == policy


def test_truncated_and_big_endian(model, policy, tmp_path):
    out = tmp_path / "out.gguf"
    data = model.read_bytes()
    with GGUFFile(model) as file:
        need = file.data_start + max(t.offset + t.n_bytes for t in file.tensors)
        data_start = file.data_start
    model.write_bytes(data[: need - 100])
    assert refused(embed, model, policy, out) == (
        f"{model}: truncated: its tensors need {need:,} bytes, the file has {need - 100:,} bytes"
    )
    model.write_bytes(data[:data_start])
    assert refused(embed, model, policy, out) == (
        f"{model}: truncated: it lists 3 tensors, but ends with its header at {data_start:,} bytes"
    )
    model.write_bytes(data[:100])
    assert (
        refused(embed, model, policy, out)
        == f"{model}: truncated: its header goes on past the end, the file has 100 bytes"
    )
    model.write_bytes(data[:4] + struct.pack(">I", 3) + data[8:])
    assert (
        refused(embed, model, policy, out)
        == f"{model}: big-endian GGUF found, little-endian expected: convert the file first"
    )
    assert not out.exists()


DAMAGED_KEYS = [
    ({"hwkv.version": 2}, "key 'hwkv.version' is 2, 1 expected"),
    ({"hwkv.version": "1"}, "key 'hwkv.version' is \"1\", 1 expected"),
    ({"hwkv.n_sink": -1.5}, "key 'hwkv.n_sink' is -1.5, an integer from 0 to 2147483647 expected"),
    ({"hwkv.layers": ...}, "key 'hwkv.layers' is missing"),
    ({"hwkv.windows": [0.5] * 4}, "key 'hwkv.windows[0]' is 0.5, -1 for full or 1 to 2147483647 tokens expected"),
    ({"hwkv.layers": [0, 0]}, "key 'hwkv.layers[1]' lists layer 0 a second time"),
    ({"hwkv.head_counts": [2, 3]}, "key 'hwkv.head_counts' has 2 counts that sum to 5, 2 that sum to 4 expected"),
    ({"hwkv.head_counts": [4]}, "key 'hwkv.head_counts' has 1 counts that sum to 4, 2 that sum to 4 expected"),
    ({"hwkv.windows": [1, 0, 1, 1]}, "key 'hwkv.windows[1]' is 0, -1 for full or 1 to 2147483647 tokens expected"),
    (
        {"hwkv.windows": ([1, -2, 1, 1], GGUFValueType.ARRAY, GGUFValueType.INT32)},
        "key 'hwkv.windows[1]' is -2, -1 for full or 1 to 2147483647 tokens expected",
    ),
    ({"hwkv.head_counts": [4, 0]}, "key 'hwkv.head_counts[1]' is 0, an integer from 1 to 65536 expected"),
    (
        {"hwkv.model": "{"},
        "key 'hwkv.model': not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
    ),
    ({"hwkv.model": 3}, "key 'hwkv.model' is of another type, a string expected"),
    ({"hwkv.provenance": '{"x": NaN}'}, "key 'hwkv.provenance': not JSON: NaN is not a JSON value"),
    (
        {"hwkv.provenance": '{"x": "\\ud800"}'},
        "key 'hwkv.provenance': not JSON: it has a text with half a surrogate pair",
    ),
    (
        {"hwkv.provenance": "[" * 200_000},
        "key 'hwkv.provenance': its JSON is nested too deeply: at most 63 levels expected",
    ),
    ({"split.count": "two"}, "key 'split.count' is 'two', a number expected"),
    ({"hwkv.provenance": "[]"}, "key 'hwkv.provenance': holds [], a JSON object expected"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED_KEYS)
def test_damaged_keys(tmp_path, changes, message):
    keys = {
        "hwkv.version": 1,
        "hwkv.n_sink": 0,
        "hwkv.layers": [0, 1],
        "hwkv.head_counts": [2, 2],
        "hwkv.windows": [1, 1, 1, 1],
    }
    keys = {key: value for key, value in {**keys, **changes}.items() if value is not ...}
    path = write_gguf(tmp_path / "bad.gguf", "llama", {**SHAPE, **keys})
    assert refused(read_policy, path) == f"{path}: {message}"


# full disks, read-only disks, and interrupts


def test_disk_full(policy, tmp_path, tmpfs):
    model = make_model(tmp_path / "model.gguf")
    with open(model, "ab") as file:
        file.write(os.urandom(3 * 2**20))
    folder = tmpfs("1m")
    (folder / "mine").write_text("mine")
    before = contents(tmp_path)
    assert refused(embed, model, policy, folder / "out.gguf") == (
        f"{folder}/out.gguf: cannot write: the disk is full; nothing was left behind"
    )
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert contents(tmp_path) == before
    (folder / "mine").write_bytes(bytes(900_000))
    assert refused(Policy(ROWS, provenance={"a": "x" * 200_000}).save, folder / "p.json") == (
        f"{folder}/p.json: cannot write: the disk is full; nothing was left behind"
    )
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_disk_full_keeps_the_old_file(model, policy, tmpfs):
    with open(model, "ab") as file:
        file.write(os.urandom(3 * 2**20))
    folder = tmpfs("1m")
    (folder / "out.gguf").write_text("old")
    refused(embed, model, policy, folder / "out.gguf", force=True)
    assert (folder / "out.gguf").read_text() == "old"


def test_read_only_disk(model, policy, tmpfs):
    folder = tmpfs("1m", read_only=True)
    assert (
        refused(embed, model, policy, folder / "out.gguf") == f"{folder}/out.gguf: cannot write: Read-only file system"
    )


SLOW = textwrap.dedent("""
    import os, sys, time
    def slowly(function):
        def slow(*arguments):
            time.sleep(0.2)
            return function(*arguments)
        return slow
    for name in ("copy_file_range", "pread"):
        if hasattr(os, name):
            setattr(os, name, slowly(getattr(os, name)))
    from hwkv_llamacpp.cli.main import main
    sys.exit(main(sys.argv[1:]))
""")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(model, policy, tmp_path, signum, code):
    """A signal while tensor data is copied: the documented exit code, nothing left, and a sentence for who pressed
    Ctrl-C."""
    os.truncate(model, 2**32)  # sparse: 64 chunks, each slowed down
    saved = tmp_path / "p.json"
    policy.save(saved)
    out = tmp_path / "out.gguf"
    out.write_text("old")
    command = [sys.executable, "-c", SLOW, "embed", str(model), str(saved), "-o", str(out), "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 2**20 for path in tmp_path.glob(".hwkv-*")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the copy did not start"
            time.sleep(0.01)
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (
        code,
        "",
        "\ninterrupted; no file was left half written\n" if code == 130 else "",
    )
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out.gguf", "p.json"]
    assert model.stat().st_size == 2**32


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak memory from")
def test_needs_no_memory_for_the_data(model, policy, tmp_path):
    """A file of 8 GiB (sparse) embeds with little resident memory."""
    os.truncate(model, 2**33)
    saved = tmp_path / "p.json"
    policy.save(saved)
    script = textwrap.dedent("""
        import os, sys
        def leave_hole(source, target, n, at):  # the test is about memory, not about the disk
            os.ftruncate(target, os.lseek(target, n, os.SEEK_CUR))
            return n
        os.copy_file_range = leave_hole
        from hwkv_llamacpp.cli.main import main
        code = main(sys.argv[1:])
        print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
        sys.exit(code)
    """)
    out = tmp_path / "out.gguf"
    done = subprocess.run(
        [sys.executable, "-c", script, "embed", model, saved, "-o", out], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) < 200 * 1024
    assert read_policy(out) == policy
    assert out.stat().st_size > 2**33
