"""Geometry from GGUF headers: the rules of llama.cpp's architectures, and files that are not what they should be."""

import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import write_gguf
from gguf import GGUFReader, GGUFValueType

from hwkv_llamacpp import HwkvError, ModelGeometry
from hwkv_llamacpp.gguf.file import GGUFFile
from hwkv_llamacpp.gguf.geometry import ARCHITECTURES

LETTERS = {"A": "attention", "s": "swa", "r": "recurrent", "-": "none", "u": "reuse", "X": "unsupported"}


def kinds(geometry):
    letter = {kind: letter for letter, kind in LETTERS.items()}
    return "".join(letter[layer.kind] for layer in geometry.layers)


# real models


def test_smollm2(smollm2):
    geometry = ModelGeometry.from_gguf(smollm2)
    assert (geometry.architecture, geometry.n_layer, geometry.n_ctx_train, geometry.n_vocab) == (
        "llama",
        30,
        8192,
        49152,
    )
    assert kinds(geometry) == "A" * 30
    assert {(x.n_head, x.n_head_kv, x.n_gqa, x.head_dim_k, x.head_dim_v) for x in geometry.layers} == {
        (9, 3, 3, 64, 64)
    }
    assert geometry.kv_bytes_per_token == 30 * 3 * 128 * 2


def test_gemma3(gemma3):
    geometry = ModelGeometry.from_gguf(gemma3)
    assert kinds(geometry) == "sssssA" * 3
    assert geometry.n_swa == 512
    assert geometry.layers[0].reason == "it has the model's own sliding window of 512 tokens"


def test_mini_hybrid(mini_hybrid):
    geometry = ModelGeometry.from_gguf(mini_hybrid)
    assert kinds(geometry) == "rrrArrrA"
    assert [x.layer for x in geometry.configurable] == [3, 7]
    assert geometry.kv_bytes_per_token == 2 * 4 * 128 * 2


def test_header_agrees_with_gguf_reader(mini_hybrid):
    """Every key and tensor info, against the official reader."""
    reader = GGUFReader(mini_hybrid)
    with GGUFFile(mini_hybrid) as file:
        assert list(file.fields) == [key for key in reader.fields if not key.startswith("GGUF.")]
        for key, field in file.fields.items():
            expected = reader.fields[key].contents()
            assert file.get(key) == expected, key
            assert field.start == reader.fields[key].offset
        assert file.data_start == reader.data_offset
        assert [(t.name, t.type, t.n_bytes) for t in file.tensors] == [
            (t.name, t.tensor_type, t.n_bytes) for t in reader.tensors
        ]


# models from the field, by their metadata


def test_lfm2_1_2b(metadata_gguf):
    heads = [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]
    geometry = ModelGeometry.from_gguf(
        metadata_gguf(
            "lfm2",
            {
                "block_count": 16,
                "embedding_length": 2048,
                "attention.head_count": 32,
                "attention.head_count_kv": heads,
                "shortconv.l_cache": 3,
            },
        )
    )
    assert [x.layer for x in geometry.configurable] == [2, 5, 8, 10, 12, 14]
    assert geometry.layers[2].head_dim_k == 64
    assert geometry.kv_bytes_per_token * 32768 == 384 * 2**20


def test_qwen36_35b_a3b(metadata_gguf):
    geometry = ModelGeometry.from_gguf(
        metadata_gguf(
            "qwen35moe",
            {
                "block_count": 40,
                "embedding_length": 2048,
                "attention.head_count": 16,
                "attention.head_count_kv": 2,
                "attention.key_length": 256,
                "attention.value_length": 256,
                "full_attention_interval": 4,
            },
        )
    )
    assert kinds(geometry) == "rrrA" * 10
    assert geometry.kv_bytes_per_token == 20_480


def test_granite_4_hybrid(metadata_gguf):
    heads = [4 if il in (5, 15, 25, 35) else 0 for il in range(40)]
    geometry = ModelGeometry.from_gguf(
        metadata_gguf(
            "granitehybrid",
            {"block_count": 40, "embedding_length": 1536, "attention.head_count": 12, "attention.head_count_kv": heads},
        )
    )
    assert [x.layer for x in geometry.configurable] == [5, 15, 25, 35]
    assert geometry.kv_bytes_per_token == 4 * 4 * 256 * 2


def test_gemma3n_e4b(metadata_gguf):
    geometry = ModelGeometry.from_gguf(metadata_gguf("gemma3n", {"block_count": 35, "attention.sliding_window": 512}))
    assert kinds(geometry) == "ssssA" * 4 + "u" * 15
    assert [x.source for x in geometry.layers[20:25]] == [18, 18, 18, 18, 19]


# rules, one case per line: architecture, keys, kinds expected

SLIDING = {"attention.sliding_window": 128}
RULES = [
    ("llama", {}, "AAAA"),
    ("llama", {"nextn_predict_layers": 1}, "AAA-"),
    ("llama", {"attention.causal": False}, "XXXX"),
    ("deci", {"attention.head_count_kv": [4, 0, 4, 4]}, "A-AA"),
    ("openelm", {"attention.head_count": [12, 8, 8, 16], "attention.head_count_kv": [3, 2, 2, 4]}, "AAAA"),
    ("phi3", SLIDING, "AAAA"),
    ("nanbeige", {"num_loops": 2}, "AAAAAAAA"),
    # periods: last dense, first dense, another period, a list, and no window at all
    ("afmoe", SLIDING, "sssA"),
    ("afmoe", {}, "AAAA"),
    ("cohere2", SLIDING, "sssA"),
    ("cohere2moe", SLIDING, "Asss"),
    ("exaone4", SLIDING, "AAAA"),
    ("exaone4", {"block_count": 64}, "sssA" * 16),
    ("exaone-moe", SLIDING, "sssA"),
    ("gemma2", {}, "sAsA"),
    ("gemma3", {"attention.sliding_window": 0, "block_count": 6}, "AAAAAA"),
    ("gpt-oss", SLIDING, "sAsA"),
    ("gpt-oss", {**SLIDING, "attention.sliding_window_pattern": 4}, "sssA"),
    ("gpt-oss", {**SLIDING, "attention.sliding_window_pattern": 0}, "ssss"),
    ("gpt-oss", {**SLIDING, "attention.sliding_window_pattern": 1}, "AAAA"),
    ("gpt-oss", {**SLIDING, "attention.sliding_window_pattern": [True, True, False, True]}, "ssAs"),
    ("laguna", SLIDING, "Asss"),
    ("llama4", {}, "sssA"),
    ("llama4", {"attention.sliding_window": 0}, "AAAA"),
    ("mellum", SLIDING, "sssA"),
    ("muse-glimmer", SLIDING, "sssA"),
    ("olmo2", SLIDING, "sssA"),
    ("plamo3", {**SLIDING, "block_count": 8}, "sssssssA"),
    ("smallthinker", SLIDING, "Asss"),
    ("smallthinker", {}, "AAAA"),
    # sliding layers that the file lists
    ("gemma4", {**SLIDING, "attention.sliding_window_pattern": [True, False, True, False]}, "sAsA"),
    (
        "gemma4",
        {**SLIDING, "attention.sliding_window_pattern": [True, False, True, False], "attention.shared_kv_layers": 2},
        "sAuu",
    ),
    ("granite_swa", {**SLIDING, "attention.sliding_window_pattern": [False, True]}, "AsAA"),
    ("maple", {**SLIDING, "attention.sliding_window_pattern": [1, 0, 0, 1]}, "sAAs"),
    ("mimo2", {**SLIDING, "attention.sliding_window_pattern": [0, 1, 1, 0], "nextn_predict_layers": 1}, "Ass-"),
    ("step35", {**SLIDING, "attention.sliding_window_pattern": [0, 1, 1, 1]}, "Asss"),
    ("spark2_5", {**SLIDING, "attention.sliding_window_pattern": [0, 1, 1, 1]}, "Asss"),
    # hybrids
    ("qwen35", {}, "rrrA"),
    ("qwen35", {"full_attention_interval": 2}, "rArA"),
    ("qwen35", {"nextn_predict_layers": 1, "block_count": 5}, "rrrA-"),
    ("qwen3next", {"attention.recurrent_layers": [True, False, False, True]}, "rAAr"),
    ("minimax-01", {"block_count": 8}, "rrrrrrrA"),
    ("jamba", {"attention.head_count_kv": [0, 4, 0, 0]}, "rArr"),
    ("falcon-h1", {}, "AAAA"),
    (
        "plamo2",
        {
            "attention.head_count": [0, 8, 0, 8],
            "attention.head_count_kv": [0, 4, 0, 4],
            "attention.key_length": 128,
            "attention.value_length": 128,
        },
        "rArA",
    ),
    ("nemotron_h", {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 512, 0]}, "rA-r"),
    ("lfm2", {"attention.head_count_kv": [0, 8, 0, 8], **SLIDING}, "rsrs"),
    ("lfm2moe", {"attention.head_count_kv": [0, 8, 0, 8]}, "rArA"),
    ("mamba", {"attention.head_count": 0}, "rrrr"),
    # refused as a whole
    ("deepseek2", {"attention.key_length_mla": 192, "attention.value_length_mla": 128}, "XXXX"),
    ("deepseek2", {}, "AAAA"),
    (
        "kimi-linear",
        {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.head_count_kv": [0, 0, 0, 1]},
        "rrrX",
    ),
    ("baichuan", {"block_count": 40}, "X" * 40),
    ("baichuan", {}, "AAAA"),
    ("mpt", {"attention.max_alibi_bias": 8.0}, "XXXX"),
    ("mpt", {}, "AAAA"),
    ("bert", {}, "XXXX"),
    ("glm-dsa", {}, "XXXX"),
    ("t5", {}, "XXXX"),
    ("gemma4-assistant", {}, "XXXX"),
    ("graniteswitch", {}, "XXXX"),
]


@pytest.mark.parametrize(("architecture", "keys", "expected"), RULES, ids=lambda x: x if isinstance(x, str) else None)
def test_rules(metadata_gguf, architecture, keys, expected):
    geometry = ModelGeometry.from_gguf(metadata_gguf(architecture, keys))
    assert kinds(geometry) == expected
    assert bool(geometry.refusal) == ("A" not in expected)
    assert all((layer.reason is None) == (layer.kind == "attention") for layer in geometry.layers)


def test_head_sizes(metadata_gguf):
    """Sliding layers may have other head sizes than global ones; by default both are n_embd / n_head."""
    path = metadata_gguf(
        "gemma4",
        {
            **SLIDING,
            "attention.sliding_window_pattern": [1, 0, 1, 0],
            "attention.head_count_kv": [4, 2, 4, 2],
            "attention.key_length": 512,
            "attention.value_length": 256,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 32,
        },
    )
    sizes = [(x.n_head_kv, x.head_dim_k, x.head_dim_v) for x in ModelGeometry.from_gguf(path).layers]
    assert sizes == [(4, 64, 32), (2, 512, 256)] * 2
    assert {(x.n_head_kv, x.head_dim_k) for x in ModelGeometry.from_gguf(metadata_gguf("llama")).layers} == {(8, 128)}


def test_table_has_every_architecture_of_the_source():
    """The names in llama.cpp's own table, if its source is at hand."""
    root = Path(__file__).parents[1] / "build"
    sources = sorted(root.glob("**/src/llama-arch.cpp"))
    if not sources:
        pytest.skip("no llama.cpp source under build/: run ./build.sh")
    names = set(re.findall(r'\{ LLM_ARCH_\w+, +"([^"]+)" *\}', sources[0].read_text())) - {"(unknown)"}
    assert set(ARCHITECTURES) == names


def test_every_architecture_agrees_with_the_runtime(random_models):
    """Kinds, heads, head sizes and refusals of all models that llama.cpp's own fixture can make."""
    from hwkv_llamacpp.runtime import native

    try:
        llama_cpp = native.load()
    except HwkvError as error:
        pytest.skip(str(error))
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    for path in random_models:
        geometry = ModelGeometry.from_gguf(path)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, path
        theirs = native.layers(model)
        llama_cpp.llama_model_free(model)
        assert bool(theirs["refusal"]) == bool(geometry.refusal), path
        if not geometry.refusal:
            assert [
                (x["layer"], x["kind"], x["n_head"], x["n_head_kv"], x["head_dim_k"], x["head_dim_v"])
                for x in theirs["layers"]
            ] == [(x.layer, x.kind, x.n_head, x.n_head_kv, x.head_dim_k, x.head_dim_v) for x in geometry.layers], path


def test_fingerprint_is_of_the_shape_only(metadata_gguf):
    base = ModelGeometry.from_gguf(metadata_gguf("llama", {"general.name": "one", "general.file_type": 1}))
    same = ModelGeometry.from_gguf(metadata_gguf("llama", {"general.name": "two", "general.file_type": 7}))
    other = ModelGeometry.from_gguf(metadata_gguf("llama", {"attention.head_count_kv": 4}))
    assert base.fingerprint == same.fingerprint != other.fingerprint
    assert re.fullmatch(r"[0-9a-f]{64}", base.fingerprint)


# files that are not what they should be


def error(path):
    with pytest.raises(HwkvError) as caught:
        ModelGeometry.from_gguf(path)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(str(path), "FILE")


BAD_KEYS = [
    ("zzz", {}, "FILE: architecture 'zzz' is not known to this version"),
    (
        "llama",
        {"block_count": 0},
        "FILE: key 'llama.block_count' is 0 (0 of them for next-token prediction), 1 to 512 expected",
    ),
    (
        "llama",
        {"block_count": 4_000_000_000},
        "FILE: key 'llama.block_count' is 4000000000 (0 of them for next-token prediction), 1 to 512 expected",
    ),
    (
        "llama",
        {"nextn_predict_layers": 5},
        "FILE: key 'llama.block_count' is 4 (5 of them for next-token prediction), 1 to 512 expected",
    ),
    ("llama", {"block_count": "four"}, "FILE: key 'llama.block_count' is 'four', a non-negative integer expected"),
    (
        "llama",
        {"block_count": (-4, GGUFValueType.INT32)},
        "FILE: key 'llama.block_count' is -4, a non-negative integer expected",
    ),
    (
        "llama",
        {"attention.head_count_kv": [4, 4]},
        "FILE: key 'llama.attention.head_count_kv' has 2 values, one for each of 4 blocks expected",
    ),
    (
        "llama",
        {"attention.head_count_kv": ["a", "b", "c", "d"]},
        "FILE: key 'llama.attention.head_count_kv' holds something else than non-negative integers",
    ),
    ("cohere2", {}, "FILE: key 'cohere2.attention.sliding_window' is missing"),
    ("mimo2", SLIDING, "FILE: key 'mimo2.attention.sliding_window_pattern' is missing, an array expected"),
    ("qwen35", {"full_attention_interval": 0}, "FILE: key 'qwen35.full_attention_interval' is 0"),
    (
        "gemma4",
        {**SLIDING, "attention.sliding_window_pattern": [1, 0, 1, 0], "attention.shared_kv_layers": 3},
        "FILE: key 'gemma4.attention.shared_kv_layers' leaves 1 layers with KV of their own, at least 2 expected",
    ),
    ("nanbeige", {"num_loops": 200}, "FILE: 4 layers repeated 200 times are more than 512"),
]


@pytest.mark.parametrize(("architecture", "keys", "message"), BAD_KEYS)
def test_bad_keys(metadata_gguf, architecture, keys, message):
    assert error(metadata_gguf(architecture, keys)) == message


def test_missing_keys(tmp_path):
    assert error(write_gguf(tmp_path / "a.gguf", "llama", {})) == "FILE: key 'llama.context_length' is missing"


def test_not_a_gguf(tmp_path):
    missing, empty, text, short = (tmp_path / name for name in ("missing", "empty", "text", "short"))
    empty.touch()
    text.write_text("hello, world")
    short.write_bytes(b"GGUF\3")
    assert error(missing) == "FILE: cannot read: No such file or directory"
    assert error(tmp_path) == "FILE: cannot read: Is a directory"
    assert error(empty) == "FILE: not a GGUF file: it is empty"
    assert error(text) == "FILE: not a GGUF file: it starts with b'hell', not b'GGUF'"
    assert error(short) == "FILE: truncated: its header goes on past the end, the file has 5 bytes"


def test_versions_and_byte_order(tmp_path):
    path = tmp_path / "model.gguf"
    for version, message in (
        (struct.pack("<I", 1), "FILE: GGUF version 1 found, 2 or 3 expected"),
        (struct.pack("<I", 4), "FILE: GGUF version 4 found, 2 or 3 expected"),
        (struct.pack(">I", 3), "FILE: big-endian GGUF found, little-endian expected: convert the file first"),
    ):
        path.write_bytes(b"GGUF" + version + bytes(64))
        assert error(path) == message


@pytest.fixture
def tiny(tmp_path):
    """A complete llama-shaped GGUF of a few KB, with keys of every type."""
    return write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        {
            "context_length": 512,
            "embedding_length": 64,
            "block_count": 2,
            "attention.head_count": 4,
            "tokenizer.ggml.tokens": ["a", "b", "ü"],
            "x.floats": [0.5, 1.5],
            "x.flag": True,
            "x.text": "täxt",
            "x.i8": (-3, GGUFValueType.INT8),
            "x.u64": (2**63, GGUFValueType.UINT64),
            "x.f64": (1e300, GGUFValueType.FLOAT64),
        },
        {"token_embd.weight": np.ones((3, 64), np.float32), "output.weight": np.ones((5, 64), np.float16)},
    )


def test_truncated_anywhere(tiny, tmp_path):
    """A file cut at any byte is refused in one sentence, unless exactly the data is missing."""
    data = tiny.read_bytes()
    with GGUFFile(tiny) as file:
        header = range(file.infos_end, file.data_start + 1)
        need = file.data_start + max(t.offset + t.n_bytes for t in file.tensors)
    cut = tmp_path / "cut.gguf"
    for n in [*range(1, header.stop + 40), len(data) // 2, need - 1]:
        cut.write_bytes(data[:n])
        if n in header:
            assert ModelGeometry.from_gguf(cut).n_layer == 2
        else:
            assert error(cut)
    assert error(cut) == f"FILE: truncated: its tensors need {need:,} bytes, the file has {need - 1:,} bytes"


def test_damaged_anywhere(tiny, tmp_path):
    """Random damage of the header gives a geometry or one sentence, never another exception, and never hangs."""
    rng = random.Random(0)
    data = tiny.read_bytes()
    with GGUFFile(tiny) as file:
        header = file.infos_end
    bad = tmp_path / "bad.gguf"
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        bad.write_bytes(damaged)
        try:
            ModelGeometry.from_gguf(bad)
        except HwkvError as caught:
            assert str(bad) in str(caught)


def test_duplicate_key(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "llama", {"x.one": 1, "x.two": 2})
    path.write_bytes(path.read_bytes().replace(b"x.two", b"x.one"))
    assert error(path) == "FILE: key 'x.one' occurs twice"


# split models


def split(tmp_path, n=3, prefix="big"):
    keys = {"context_length": 512, "embedding_length": 64, "block_count": 2, "attention.head_count": 4}
    for no in range(n):
        write_gguf(
            tmp_path / f"{prefix}-{no + 1:05d}-of-{n:05d}.gguf",
            "llama",
            {
                **(keys if no == 0 else {}),
                "split.no": (no, GGUFValueType.UINT16),
                "split.count": (n, GGUFValueType.UINT16),
            },
        )
    return [tmp_path / f"{prefix}-{no + 1:05d}-of-{n:05d}.gguf" for no in range(n)]


def test_any_shard_finds_the_set(tmp_path):
    shards = split(tmp_path)
    assert len({ModelGeometry.from_gguf(path) for path in shards}) == 1


def test_shard_with_a_wrong_name(tmp_path):
    renamed = split(tmp_path)[1].rename(tmp_path / "other.gguf")
    assert error(renamed) == "FILE: one of 3 shards, but its name does not end in -0000N-of-00003.gguf"


def test_first_shard_is_missing(tmp_path):
    shards = split(tmp_path)
    shards[0].unlink()
    assert error(shards[2]) == f"{shards[0]}: cannot read: No such file or directory"
