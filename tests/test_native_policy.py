"""The C++ reader of policies: the same rules as the Python one, whatever the file is."""

import os
import re
import subprocess
import threading
from dataclasses import replace

import pytest
from conftest import write_gguf
from data.verdicts import JSON
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.gguf.embed import embed
from hwkv_llamacpp.plan import dry_run
from hwkv_llamacpp.runtime import native


@pytest.fixture(scope="module")
def register():
    try:
        native.load()
    except HwkvError as error:
        pytest.skip(str(error))
    return native.register


def test_bad_text_is_one_sentence(register):
    """As of a file: test_verdicts.py has the table."""
    for name, content, words in JSON:
        if words and b"\0" not in content and content.isascii():
            with pytest.raises(HwkvError) as error:
                register(content.decode())
            assert words in str(error.value), name
            assert str(error.value).startswith("hwkv policy: ")


def complete(model, *words, **env):
    """llama-completion on the mini hybrid: (exit code, what it says)."""
    done = subprocess.run(
        [
            native.binary("llama-completion"),
            "-m",
            model,
            "-n",
            "2",
            "-p",
            "fox is 427.",
            "-c",
            "512",
            "-ub",
            "64",
            "-t",
            "1",
            "--no-warmup",
            "-no-cnv",
            *map(str, words),
        ],
        capture_output=True,
        timeout=120,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.fixture
def windows(mini_hybrid, tmp_path):
    path = tmp_path / "policy.json"
    uniform(ModelGeometry.from_gguf(mini_hybrid), 64).save(path)
    return path


def test_policy_through_a_pipe(register, mini_hybrid, windows, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(windows.read_bytes()), daemon=True)
    writer.start()
    code, said = complete(mini_hybrid, "--hwkv-policy", fifo)
    writer.join(10)
    assert code == 0 and "hwkv policy" in said


@pytest.mark.parametrize(
    "name, words",
    [
        ("missing.json", "cannot open the policy file"),
        ("", "cannot read the policy file"),
        ("empty.json", "or it is empty"),
        ("zero", "it has more bytes, at most 1048576 expected"),
        ("other.gguf", "has no embedded policy"),
    ],
)
def test_bad_file_is_one_sentence(register, mini_hybrid, tmp_path, name, words):
    (tmp_path / "empty.json").touch()
    (tmp_path / "zero").symlink_to("/dev/zero")
    write_gguf(tmp_path / "other.gguf", "llama", {"block_count": 1})
    code, said = complete(mini_hybrid, "--hwkv-policy", tmp_path / name)
    assert code != 0
    assert sum(words in line for line in said.splitlines()) == 1


@pytest.mark.parametrize(
    "model, said",
    [
        (
            '{"architecture": "llama"}',
            'model.architecture is "llama", but the model is "qwen35": a policy of another model',
        ),
        ('{"n_layer": 9}', "model.n_layer is 9, but the model has 8 layers: a policy of another model"),
        ("{", "key 'hwkv.model': not JSON"),
        ('{"colour": 1}', "key 'hwkv.model': key 'colour' is unknown"),
    ],
)
def test_a_gguf_whose_policy_is_of_another_model(register, mini_hybrid, windows, tmp_path, model, said):
    """As for a JSON, whatever the heads."""
    carrier = tmp_path / "carrier.gguf"
    embed(mini_hybrid, replace(Policy.load(windows), model=None), carrier)
    other = tmp_path / "other.gguf"
    _with_key(carrier, other, "hwkv.model", model)
    code, log = complete(mini_hybrid, "--hwkv-policy", other)
    assert code != 0 and said in log


@pytest.mark.parametrize(
    "words",
    [
        ("llama-completion", "-c", 2048, "-n", 2, "-p", "fox is 427.", "-no-cnv"),
        ("llama-cli", "-c", 2048, "-n", 2, "-p", "fox is 427.", "-st", "-lv", 4),
        ("llama-perplexity", "-c", 2048, "-b", 2048, "-f", "TEXT"),
        ("llama-batched-bench", "-c", 2048, "-npp", 64, "-ntg", 2, "-npl", 1, "-lv", 4),
        ("llama-bench", "-v", "-p", 2044, "-n", 4, "-r", 1, "-fa", 1),
        ("llama-fit-params", "-c", 2048, "-fitp", "on", "-lv", 4),
    ],
    ids=lambda words: words[0],
)
def test_every_program_takes_a_policy(register, mini_hybrid, windows, tmp_path, words):
    """And says what it keeps, in the table that README.md shows."""
    (tmp_path / "text").write_text("the old man ran to the sea. " * 900)
    geometry = ModelGeometry.from_gguf(mini_hybrid)
    policy = uniform(geometry, 64, [(7, 1)])
    policy.save(windows, overwrite=True)
    done = subprocess.run(
        [
            native.binary(words[0]),
            "-m",
            mini_hybrid,
            "--hwkv-policy",
            windows,
            "-ub",
            "64",
            "-t",
            "1",
            *(str(word).replace("TEXT", str(tmp_path / "text")) for word in words[1:]),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    if words[0] == "llama-fit-params":  # whose context is never a program's own
        with_full = subprocess.run(
            [native.binary(words[0]), "-m", mini_hybrid, *map(str, words[1:])],
            capture_output=True,
            text=True,
            timeout=300,
        )
        context, full = (dry_run.breakdown(text)["Host"]["context"] for text in (said, with_full.stderr))
        assert full - context >= 2 * 2**20  # 4 MiB of KV are 1.06 MiB then
        return
    table = [re.sub(".*: ", "", line).strip() for line in said.splitlines() if "|" in line and "|--" not in line]
    assert (
        "full |      1 |        1 |     2048 |       0.50" in table
        and "64 |      2 |        7 |      256 |       0.44" in table
    )
    assert f"hwkv policy {policy.fingerprint(geometry.n_layer)} from {windows}" in said
    assert "KV cache of the configurable layers: 0.94 MiB, with full windows it would be 4.00 MiB (23.4 % kept)" in said


def test_fitting_to_memory_finds_the_largest_context(register, smollm2):
    """llama.cpp's automatic fit. Under a policy memory is no straight line over the context: windows stop growing."""

    def fit(*words):
        done = subprocess.run(
            [native.binary("llama-fit-params"), "-m", smollm2, "-ub", "128", "-lv", "4", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done

    def used(n_ctx, *policy):
        """MiB, less than 3 too few: its parts are whole MiB."""
        return sum(dry_run.breakdown(fit("-c", n_ctx, "-fitp", "on", *policy).stderr)["Host"].values()) / 2**20

    policy = ("--hwkv-policy", native.ROOT / "policies" / "SmolLM2-135M-Instruct" / "seqcalib.json")
    memory = int(re.search(r"vs. (\d+) MiB of total host memory", fit("-c", 1024).stderr)[1])
    found = {}
    for words in ((), policy):
        found[words] = int(re.search(r"-c (\d+)", fit("-fitc", 1024, "-fitt", memory - 170, *words).stdout)[1])
        assert used(found[words], *words) <= 170 < used(found[words] + 1024, *words)
    print(f"170 MiB hold {found[()]:,} tokens, and {found[policy]:,} under the policy")
    assert found[policy] > 1.5 * found[()]


def test_path_that_is_not_utf8(register, mini_hybrid, windows):
    path = os.fsencode(windows.parent) + b"/p\xff.json"
    os.rename(windows, path)
    code, said = complete(mini_hybrid, "--hwkv-policy", os.fsdecode(path))
    assert code == 0 and "hwkv policy" in said


def test_environment_and_override(register, mini_hybrid, windows):
    assert "hwkv policy" in complete(mini_hybrid, LLAMA_ARG_HWKV_POLICY=str(windows))[1]
    code, said = complete(mini_hybrid, LLAMA_ARG_HWKV_POLICY="")  # as if it were not set
    assert code == 0 and "hwkv policy" not in said
    code, said = complete(mini_hybrid, "--override-kv", "hwkv.policy=int:3")
    assert code != 0 and "the kv override hwkv.policy is not a string" in said


def test_only_the_user_names_a_policy_file(register, mini_hybrid, windows, tmp_path):
    """A GGUF must not make the loader read a file of its choice: its key hwkv.policy means nothing."""
    evil = tmp_path / "evil.gguf"
    _with_key(mini_hybrid, evil, "hwkv.policy", "/etc/passwd")
    code, said = complete(evil)
    assert code == 0 and "/etc/passwd" not in said


def test_embedded_policy_and_its_override(register, mini_hybrid, windows, tmp_path):
    carrier = tmp_path / "carrier.gguf"
    embed(mini_hybrid, Policy.load(windows), carrier)
    assert "hwkv policy" in complete(carrier)[1]
    for off in (("--hwkv-policy", "off"), ("--override-kv", "hwkv.policy=str:off")):
        code, said = complete(carrier, *off)
        assert code == 0 and "hwkv policy" not in said


def _with_key(source, target, key, value):
    """A copy of a GGUF with one more string key."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                field.name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    writer.add_string(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_policy_from_a_pipe(mini_hybrid, windows, tmp_path):
    """It can be read only once, however often a program needs it."""
    for program, *words in (
        ("llama-completion", "-n", "2", "-p", "fox", "-c", "512", "-no-cnv"),
        ("llama-bench", "-p", "32", "-n", "4", "-r", "1"),
    ):
        done = subprocess.run(
            [
                "bash",
                "-c",
                '"$@" --hwkv-policy <(cat "$POLICY")',
                "bash",
                native.binary(program),
                "-m",
                mini_hybrid,
                "-t",
                "1",
                *words,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "POLICY": str(windows)},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
    assert "| /dev/fd/" in done.stdout


def test_self_extend_is_refused(mini_hybrid, windows):
    code, said = complete(mini_hybrid, "--hwkv-policy", windows, "-gan", 4, "-gaw", 256)
    assert code == 1 and "self-extend moves the positions of tokens" in said
    assert complete(mini_hybrid, "--hwkv-policy", "off", "-gan", 4, "-gaw", 256)[0] == 0
