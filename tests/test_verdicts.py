"""Two readers of policies, Python's and the runtime's, and one table of what they must say."""

import ctypes
import json
import os
import re
import subprocess
import time

import pytest
from data import verdicts
from data.verdicts import GGUF, JSON
from gguf import GGUFReader, GGUFWriter
from gguf import GGUFValueType as Type

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.base.formats import parse_json, schema
from hwkv_llamacpp.gguf import embed
from hwkv_llamacpp.policy import policy as format_
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.context import Model

MAX_MESSAGE = 400  # characters beside the path


def names(cases):
    assert len({name for name, *_ in cases}) == len(cases)
    return [name for name, *_ in cases]


@pytest.fixture(params=JSON, ids=names(JSON))
def json_case(request, tmp_path):
    """(path of the file, words)"""
    _, content, words = request.param
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    return path, words


@pytest.fixture(params=GGUF, ids=names(GGUF))
def gguf_case(request, tmp_path):
    _, keys, words = request.param
    path = tmp_path / "policy.gguf"
    path.write_bytes(verdicts.gguf_bytes(keys))
    return path, words


@pytest.fixture(scope="module")
def runtime():
    """runtime(path): the id under which the runtime keeps the policy of a file; HwkvError with its sentence."""
    try:
        lib = native.lib()
    except HwkvError as error:
        pytest.skip(str(error))
    text = ctypes.c_char_p
    lib.llama_hwkv_register_file.argtypes = [text, text, ctypes.c_size_t, text, ctypes.c_size_t]

    def register(path):
        name, error = ctypes.create_string_buffer(64), ctypes.create_string_buffer(4096)
        if lib.llama_hwkv_register_file(os.fsencode(path), name, len(name), error, len(error)) != 0:
            raise HwkvErrorOfRuntime(error.value.decode())
        return name.value.decode()

    return register


class HwkvErrorOfRuntime(Exception):
    """Its text is as the runtime gave it: nothing is escaped on the way."""


@pytest.fixture(scope="module")
def model(mini_hybrid):
    with Model(mini_hybrid) as model:
        yield model


def assert_refused(read, path, words):
    with pytest.raises((HwkvError, HwkvErrorOfRuntime)) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and words in said
    assert said.isprintable()
    assert len(said) <= len(str(path)) + MAX_MESSAGE


def assert_python(path, words):
    if words is not None:
        return assert_refused(Policy.load, path, words)
    policy = Policy.load(path)
    assert Policy.from_json(policy.to_json()) == policy


def assert_runtime(runtime, path, words, model, mini_hybrid):
    """What is taken means the same: a context under it has the fingerprint that Python computes."""
    if words is not None:
        return assert_refused(runtime, path, words)
    geometry, policy, id_ = ModelGeometry.from_gguf(mini_hybrid), Policy.load(path), runtime(path)
    if policy.model and "fingerprint" in policy.model:  # made up
        return
    policy.check(geometry)
    error = ctypes.create_string_buffer(1024)
    assert native.lib().llama_hwkv_select(model._handle, id_.encode(), error, len(error)) == 0, error.value
    context = native.load().llama_context_default_params()
    context.n_ctx, context.n_ubatch, context.n_seq_max = 512, 64, 1
    handle = native.load().llama_init_from_model(model._handle, context)
    assert handle
    try:
        info = native.info(handle)
    finally:
        native.load().llama_free(handle)
    if info["active"]:  # not if all that is windowed covers the context
        assert info["fingerprint"] == policy.fingerprint(geometry.n_layer)
        assert info["source"] == str(path)
    else:
        assert all(w is None or w + policy.n_sink >= 512 for row in policy.layers.values() for w in row)


def test_json_in_python(json_case):
    assert_python(*json_case)


def test_json_in_the_runtime(runtime, json_case, model, mini_hybrid):
    assert_runtime(runtime, *json_case, model, mini_hybrid)


def test_gguf_in_python(gguf_case):
    assert_python(*gguf_case)


def test_gguf_in_the_runtime(runtime, gguf_case, model, mini_hybrid):
    assert_runtime(runtime, *gguf_case, model, mini_hybrid)


def test_the_limits_are_the_same():
    source = (native.ROOT / "native" / "src" / "llama-hwkv-policy.cpp").read_text()
    assert "HWKV_MAX_BYTES   = 1024 * 1024;" in source and format_.MAX_FILE_BYTES == verdicts.MAX_BYTES == 2**20
    assert "HWKV_MAX_ENTRIES = 65536;" in source and embed.MAX_ENTRIES == verdicts.MAX_ENTRIES == 65536


def test_reading_takes_no_time(runtime, tmp_path):
    """As many keys as a policy can have: looking each up among all before it took six seconds."""
    path = tmp_path / "policy.json"
    path.write_bytes(verdicts.many_keys())
    start = time.process_time()
    runtime(path)
    assert time.process_time() - start < 3


def test_names_of_files_are_escaped(runtime, tmp_path):
    """Whatever a name holds, a message is one line that no terminal obeys."""
    for name in ("a\x1b[31m.json", "b\n\x9b.json", "c\u202e.json", "d\x7f.gguf"):
        path = tmp_path / name
        for content in (None, b"{", b"GGUF"):
            if content is not None:
                path.write_bytes(content)
            for read in (Policy.load, runtime):
                with pytest.raises((HwkvError, HwkvErrorOfRuntime)) as caught:
                    read(path)
                said = str(caught.value)
                assert said.isprintable() and name[0] in said and name[-5:] in said
    path = os.fsencode(tmp_path) + b"/\xff\xc0\x9b.json"
    for read in (Policy.load, runtime):
        with pytest.raises((HwkvError, HwkvErrorOfRuntime)) as caught:
            read(os.fsdecode(path))
        assert str(caught.value).isprintable()
    deep = tmp_path / "/".join(["d" * 200] * 10) / "p.json"
    with pytest.raises(HwkvErrorOfRuntime, match=r"^\.\.\.[d/]+/p\.json: cannot open the policy file$") as caught:
        runtime(deep)
    assert len(str(caught.value)) < MAX_MESSAGE
    japanese = tmp_path / "日本 é.json"
    assert_refused(runtime, japanese, "cannot open")
    assert_refused(Policy.load, japanese, "cannot read")


def test_a_device_is_not_read_to_its_end(runtime):
    for read in (Policy.load, runtime):
        assert_refused(read, "/dev/zero", "not a policy: it has more bytes, at most 1048576 expected")


# the schema


def test_the_schema_says_what_the_table_says():
    """An independent validator takes what is taken, and refuses what is refused for its values."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema(format_.PolicyFile))
    validator.check_schema(validator.schema)
    n = 0
    for name, content, words in JSON:
        try:
            data = parse_json(content.decode(), name)
        except (HwkvError, UnicodeDecodeError):
            continue  # not for the schema to say
        if words is not None and (" is 1.0," in words or ".0, " in words or "a second time" in words):
            continue  # a number of value 1 is an integer for JSON schema; that layers differ it cannot say
        if "not a policy" in (words or "") or name == "fingerprint with a line end":
            continue  # Python's $ takes the line end, that of JSON schema does not
        assert validator.is_valid(data) == (words is None), name
        n += 1
    assert n > 60


def test_the_schema_is_printed(hwkv):
    code, out, _ = hwkv("policy", "schema")
    printed = json.loads(out)
    assert code == 0 and printed == schema(format_.PolicyFile)
    assert list(printed["properties"]) == ["format", "version", "model", "n_sink", "layers", "provenance"]
    assert printed["required"] == ["format", "version", "layers"] and printed["additionalProperties"] is False


# the real programs


def complete(model, *words):
    done = subprocess.run(
        [native.binary("llama-completion"), "-m", model, "-n", "2", "-p", "fox is 427.", "-c", "512", "-t", "1"]
        + ["--no-warmup", "-no-cnv", *map(str, words)],
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize("name", ["byte-order mark", "too large", "window 0", "unknown key with an escape sequence"])
def test_a_program_says_it(runtime, mini_hybrid, tmp_path, name):
    path = tmp_path / "policy.json"
    content, words = next((content, words) for n, content, words in JSON if n == name)
    path.write_bytes(content)
    code, said = complete(mini_hybrid, "--hwkv-policy", path)
    assert code != 0 and "\x1b[31m" not in said
    assert sum(f"{path}: " in line and words in line for line in said.splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (verdicts.keys(version=...), "key 'hwkv.version' is missing"),
        (verdicts.only(windows=verdicts.i32(64)), "key 'hwkv.version' is missing"),
        (verdicts.keys(windows=verdicts.array(Type.UINT64, *[2**32 + 64] * 8)), "is 4294967360"),
        (verdicts.keys(version=(1, Type.UINT64), windows=verdicts.array(Type.UINT8, *[64] * 8)), None),
    ],
)
def test_a_model_with_such_keys(runtime, mini_hybrid, tmp_path, keys, words):
    """It loads under its policy, or not at all: never with full KV in silence."""
    path = tmp_path / "model.gguf"
    add_keys(mini_hybrid, path, keys)
    code, said = complete(path)
    if words is None:
        assert code == 0 and f"hwkv policy {embed.read_policy(path).fingerprint(8)} from embedded hwkv policy" in said
    else:
        assert code != 0 and words in said
        with pytest.raises(HwkvError, match=re.escape(words)):
            embed.read_policy(path)
        assert complete(path, "--hwkv-policy", "off")[0] == 0


def add_keys(source, target, keys):
    """A copy of a GGUF with more keys."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            item = field.types[-1] if kind == Type.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, item)
    for key, value in keys.items():
        writer.add_key_value(key, *(value if isinstance(value, tuple) else (value, Type.STRING)))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
