"""Damaged and hostile files: one verdict in every command, short sentences, and nothing that a terminal obeys."""

import json
import struct
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pytest
from conftest import write_gguf
from gguf import GGUFValueType

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.base import names
from hwkv_llamacpp.gguf.embed import read_policy
from hwkv_llamacpp.gguf.file import GGUFFile
from hwkv_llamacpp.plan.planner import Planner

HYBRID = {
    "block_count": 8,
    "attention.head_count_kv": 2,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 512,
    "ssm.state_size": 64,
    "ssm.group_count": 2,
}
ESC = "\x1b]0;owned\x07\x1b[31m"
HOSTILE = f"a{ESC}\x7f\x9b2J\u202egnp\r\n\u2028[/b]z"
SHOWN = r"a\x1b]0;owned\x07\x1b[31m\x7f\x9b2J\u202egnp\r\n\u2028[/b]z"


@pytest.fixture
def policy(tmp_path):
    Policy({0: [64] * 8}).save(tmp_path / "policy.json")
    return tmp_path / "policy.json"


# one verdict


def layout(path, alignment, n_data):
    """A llama with one tensor of n_data bytes at an alignment that the official writer has no memory for."""
    keys = {"context_length": 512, "embedding_length": 64, "block_count": 1, "attention.head_count": 1}
    write_gguf(path, "llama", keys, {"a": np.arange(n_data, dtype=np.int8)}, alignment=32)
    header = path.read_bytes()
    with GGUFFile(path) as file:
        at, end, data = file.fields["general.alignment"].value, file.infos_end, header[file.data_start :]
    with open(path, "wb") as file:
        file.write(header[:at] + struct.pack("<I", alignment) + header[at + 4 : end])
        file.seek(-(-end // alignment) * alignment)
        file.write(data)
    return data


@pytest.mark.parametrize(
    "value, shown",
    [
        ((2**63, GGUFValueType.UINT64), "9223372036854775808 of type UINT64"),
        ((32, GGUFValueType.UINT64), "32 of type UINT64"),
        ((32, GGUFValueType.INT32), "32 of type INT32"),
        ((32.0, GGUFValueType.FLOAT32), "32.0 of type FLOAT32"),
        ((True, GGUFValueType.BOOL), "True of type BOOL"),
        ((0, GGUFValueType.UINT32), "0 of type UINT32"),
        ((48, GGUFValueType.UINT32), "48 of type UINT32"),
        ("32", "'32' of type STRING"),
        ([32] * 1_000_000, "[32, 32, 32, 32, 32, 32, ...]"),
    ],
)
def test_an_alignment_that_llama_cpp_does_not_take(hwkv, metadata_gguf, policy, tmp_path, value, shown):
    path = metadata_gguf("llama", {"general.alignment": value})
    expected = f"error: {path}: key 'general.alignment' is {shown}, a power of two of type UINT32 expected\n"
    for words in (
        ["info", path],
        ["plan", path],
        ["plan", path, "--formulas"],
        ["policy", "check", path, policy],
        ["embed", path, policy, "-o", tmp_path / "out.gguf"],
        ["extract", path],
    ):
        assert hwkv(*words) == (1, "", expected)


@pytest.mark.parametrize("alignment", [2**30, 2**31])
def test_padding_of_a_gibibyte_takes_neither_memory_nor_disk(hwkv, tmp_path, alignment):
    model, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    data = layout(model, alignment, 100)
    assert model.stat().st_size == alignment + len(data)
    path = tmp_path / "p.json"
    Policy({0: [7]}).save(path)
    script = (
        "import re, sys; from hwkv_llamacpp.cli.main import main; code = main(sys.argv[1:])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
    )
    words = [sys.executable, "-c", script, "embed", str(model), str(path), "-o", str(out)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    assert int(done.stdout.split()[-1]) < 400 * 1024  # KiB
    assert read_policy(out) == Policy({0: [7]})
    assert out.stat().st_size == alignment + len(data) and out.stat().st_blocks * 512 < 2**20
    with GGUFFile(out) as file, open(out, "rb") as raw:
        assert file.data_start == alignment and raw.seek(alignment) and raw.read() == data
    assert hwkv("plan", out, "--formulas", "-c", 512)[0] == 0


def test_a_tensor_that_no_file_can_hold(hwkv, tmp_path):
    """In a file that ends with its header nothing else is at fault."""
    path = tmp_path / "m.gguf"
    layout(path, 32, 100)
    with GGUFFile(path) as file:
        header = bytearray(path.read_bytes()[: file.data_start])
        header[file.infos_end - 8 : file.infos_end] = struct.pack("<Q", 2**63)
        end = file.data_start + 2**63 + 100
    path.write_bytes(header)
    expected = f"error: {path}: tensor 'a' ends at byte {end:,}, which no file can hold\n"
    for words in (["info", path], ["plan", path], ["plan", path, "--formulas"]):
        assert hwkv(*words) == (1, "", expected)


@pytest.mark.parametrize("name", ["ssm.state_size", "ssm.conv_kernel"])
def test_a_hybrid_without_the_size_of_its_state(hwkv, metadata_gguf, name):
    path = metadata_gguf("qwen35", {key: value for key, value in HYBRID.items() if key != name})
    for flags in ([], ["--formulas"]):
        code, out, err = hwkv("plan", path, *flags)
        assert (code, out, err.splitlines()[-1]) == (1, "", f"error: {path}: key 'qwen35.{name}' is missing")
    assert hwkv("info", path)[0] == 0
    # 6 recurrent layers; without groups there is one projection less
    whole = metadata_gguf("qwen35", HYBRID)
    assert Planner(whole).header.recurrent_bytes(ModelGeometry.from_gguf(whole), 1) == 6 * 4 * (
        3 * (512 + 2 * 2 * 64) + 64 * 512
    )


def test_a_state_size_of_another_type(hwkv, metadata_gguf):
    path = metadata_gguf("qwen35", {**HYBRID, "ssm.state_size": [64] * 1_000_000})
    expected = f"error: {path}: key 'qwen35.ssm.state_size' is [64, 64, 64, 64, 64, 64, ...], a non-negative integer"
    assert hwkv("plan", path, "--formulas")[2] == f"{expected} expected\n"


# short sentences


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "architecture, keys, message",
    [
        ("llama", {"block_count": [7] * 1_000_000}, "key 'llama.block_count' is [7, 7, 7, 7, 7, 7, ...], a non-neg"),
        ("llama", {"block_count": LONG}, "key 'llama.block_count' is 'xxxxx"),
        ("llama", {"context_length": [1.5] * 1_000_000}, "'llama.context_length' is [1.5, 1.5, 1.5, 1.5, 1.5, 1.5, "),
        ("llama", {"attention.head_count": [8] * 1_000_000}, "has 1000000 values, one for each of 4 blocks expected"),
        ("llama", {"split.count": ["2"] * 100_000}, "key 'split.count' is ['2', '2', '2', '2', '2', '2', ...], a num"),
        (LONG, {}, "architecture 'xxxxx"),
        ("llama", {"x." + LONG: (1, 99)}, "xxx' has value type 99, which GGUF does not define"),
    ],
)
def test_values_of_a_megabyte_are_clipped(hwkv, metadata_gguf, monkeypatch, architecture, keys, message):
    if keys.get("x." + LONG):  # the official writer would not write it
        path = metadata_gguf("llama", {"x." + LONG: 1})
        data = bytearray(path.read_bytes())
        at = data.index(LONG.encode()) + len(LONG)
        data[at : at + 4] = struct.pack("<I", 99)
        path.write_bytes(data)
    else:
        path = metadata_gguf("llama").with_name("m.gguf")
        write_gguf(path, architecture, {"context_length": 512, "embedding_length": 64, "block_count": 4, **keys})
    for command in (["info"], ["plan", "--formulas"]):
        code, out, err = hwkv(command[0], path, *command[1:])
        assert (code, out) == (1, "") and message in err and err.count("\n") == 1
        assert len(err) < len(str(path)) + 300


def test_an_architecture_that_is_no_text(hwkv, metadata_gguf):
    path = metadata_gguf("llama")
    data = path.read_bytes().replace(b"general.architecture\x08", b"general.architecturf\x08")
    path.write_bytes(data)
    assert hwkv("info", path)[2] == f"error: {path}: key 'general.architecture' is missing, a text expected\n"


def test_a_name_of_a_megabyte(hwkv, metadata_gguf):
    path = metadata_gguf("llama", {"general.name": LONG})
    for words in (["info", path], ["plan", path, "--formulas"]):
        code, out, _ = hwkv(*words)
        assert code == 0 and "xxx...xxx" in out and len(out) < 10_000
    assert json.loads(hwkv("info", path, "--json")[1])["name"] == LONG


def test_a_long_sentence_keeps_its_beginning_and_its_end():
    text = "/".join(["folder"] * 500) + ": cannot read: No such file or directory"
    assert len(names.message(text)) == names.MAX_MESSAGE
    assert names.message(text).startswith("folder/folder/") and names.message(text).endswith(text[-200:])
    assert names.message("x" * names.MAX_MESSAGE) == "x" * names.MAX_MESSAGE


# what a terminal obeys


def assert_harmless(*texts):
    for text in texts:
        found = {c for c in text.replace("\n", "") if unicodedata.category(c) in names.OBEYED}
        assert not found, ascii(text)


def test_escaped_text():
    assert names.escaped(HOSTILE) == SHOWN
    assert names.escaped("Grüße, 日本 \U0001f600 \udcff \xa0") == "Grüße, 日本 \U0001f600 \udcff \xa0"
    assert json.loads(names.escaped_json(json.dumps({"a": HOSTILE + "\U000e0041"}, ensure_ascii=False, indent=1))) == {
        "a": HOSTILE + "\U000e0041"
    }
    assert names.show([ESC, "é"]) == r"['\x1b]0;owned\x07\x1b[31m', 'é']"


def test_names_that_would_reach_the_terminal(hwkv, metadata_gguf, tmp_path):
    path = metadata_gguf("llama", {"general.name": HOSTILE})
    geometry = ModelGeometry.from_gguf(path)
    policy = tmp_path / f"p{ESC}.json"
    made = {"method": HOSTILE, "pattern": HOSTILE, "windows": [HOSTILE], "trace": {"text": [HOSTILE]}}
    Policy({0: [64] * 8}, model=geometry.describe(), provenance=made).save(policy)
    for words in (
        ["info", path],
        ["info", path, "--json"],
        ["plan", path, "--formulas"],
        ["plan", path, "--formulas", "--json"],
        ["policy", "show", policy],
        ["policy", "show", policy, "--json"],
        ["policy", "check", path, policy],
    ):
        code, out, err = hwkv(*words)
        assert code == 0, err
        assert_harmless(out, err)
        if "--json" in words:
            text = json.loads(out)
            assert HOSTILE in (text.get("name"), text.get("model"), (text.get("provenance") or {}).get("method"))
        elif words[1] != "check":
            assert SHOWN in out


def test_names_in_errors(hwkv, metadata_gguf, tmp_path):
    other = metadata_gguf("llama", {"general.name": HOSTILE})
    policy = tmp_path / f"p{ESC}.json"
    Policy({0: [64] * 8}, model={"architecture": HOSTILE, "name": HOSTILE}).save(policy)
    architecture = write_gguf(tmp_path / "architecture.gguf", HOSTILE)
    for words in (
        ["info", architecture],
        ["info", metadata_gguf("llama", {"block_count": HOSTILE})],
        ["info", tmp_path / f"{ESC}.gguf"],
        ["policy", "check", other, policy],
        ["plan", other, "--policy", policy, "--formulas"],
        ["policy", "show", policy, "--plot", tmp_path / f"no{ESC}" / "x.png"],
    ):
        code, out, err = hwkv(*words)
        assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
        assert_harmless(out, err)
        assert r"\x1b" in err


# many layers


def test_show_prints_no_more_layers_than_a_model_has(hwkv, tmp_path):
    path = tmp_path / "p.json"
    Policy({il: [None, il + 1] for il in range(20_000)}).save(path)
    start = time.monotonic()
    code, out, _ = hwkv("policy", "show", path)
    assert time.monotonic() - start < 20
    rows = [line.split() for line in out.splitlines()]
    rows = [row for row in rows if row and (row[0].isdigit() or row[0] == "...")]
    expected = [[str(il), "full", str(il + 1)] for il in range(20_000)]
    assert rows == [*expected[:256], "... and 19,488 more layers; --json gives all".split(), *expected[-256:]]
    layers = json.loads(hwkv("policy", "show", path, "--json")[1])["layers"]
    assert len(layers) == 20_000 and layers[300] == {"layer": 300, "windows": ["full", 301]}


def test_show_prints_all_that_a_model_can_have(hwkv, tmp_path):
    path = tmp_path / "p.json"
    Policy({il: [7] * 512 for il in range(512)}).save(path)
    out = hwkv("policy", "show", path)[1]
    assert "..." not in out and out.split().count("7") >= 512 * 512
    Policy({0: range(1, 1001)}).save(path)
    out = " ".join(hwkv("policy", "show", path)[1].split())
    assert "255 256 ... and 488 more ... 745 746" in out and "1000" in out


def test_reading_a_temporary_copy_that_the_disk_cannot_hold(tmp_path, monkeypatch):
    """A header that promises exbibytes: one sentence, not a traceback."""
    path = tmp_path / "m.gguf"
    layout(path, 32, 100)
    with GGUFFile(path) as file:
        header = bytearray(path.read_bytes()[: file.data_start])
        header[file.infos_end - 8 : file.infos_end] = struct.pack("<Q", 2**62)
        n_bytes = file.data_start + 2**62 + 100
    path.write_bytes(header)
    with pytest.raises(HwkvError, match=f"no temporary file as long as the model, {n_bytes:,} bytes: File too large"):
        Planner(path)
