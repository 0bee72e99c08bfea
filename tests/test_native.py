"""The grouped cache on small random models: native/tests/test-hwkv.cpp, in the release build and under sanitizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.runtime import native

# one of each kind of memory that the grouped cache stands in for, and of each way to make K and V
WALKED = ["llama-dense", "llama4-moe", "qwen3-dense", "gemma3-dense", "qwen35-dense", "falcon-h1-dense", "lfm2moe-moe"]

# made by the program: layers that attend an earlier layer's K and V, and more KV heads than the files have
MADE = ["made:gemma4", "made:llama", "made:qwen35"]

# architectures whose refusal the tests rely on: their random models come with these properties
REFUSED = {
    "bloom-dense": "ALiBi",
    "deepseek2-moe": "latent attention",
    "deepseek32-moe": "indexer",
    "mamba-dense": "no KV cache",
}

# tests of test_parity.py that are quick enough under sanitizers
PARITY = [
    "test_small_model[random_dense-4 sinks]",
    "test_small_model[random_hybrid-4 sinks]",
    "test_window_ends_exactly[(16, 40, 300, 16)-0-True]",
]


def run(program, *words, **env):
    done = subprocess.run(
        [program, *map(str, words)], text=True, capture_output=True, timeout=850, env={**os.environ, **env}
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr.strip(), done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def sanitized():
    """test-hwkv built with ASan and UBSan."""
    program = native.ROOT / "build" / "hwkv" / "cpu-sanitize" / "bin" / "test-hwkv"
    if not program.exists():
        pytest.skip(f"{program} is missing: run ./build.sh --sanitize")
    return program


def model(random_models, name):
    return name if name in MADE else next(path for path in random_models if path.stem == name)


@pytest.mark.long
def test_every_architecture_is_served_right_or_refused(random_models, capsys):
    """Each without sinks, and with 1, 4 or 64 of them."""
    lines = run(native.binary("test-hwkv"), "archs", random_models[0].parent)
    with capsys.disabled():
        print("", *lines, sep="\n")
    said = {}
    for line in lines[:-1]:
        said[line.split()[0]] = said.get(line.split()[0], "") + line
    assert set(said) == {path.stem for path in random_models} | set(MADE)
    assert not [line for line in said.values() if "ok:" not in line and "refused:" not in line]
    for name, why in REFUSED.items():
        assert "refused:" in said[name] and why in said[name]
    # the rest is served: a change that refuses what was served is no accident
    assert sum("ok:" in line for line in said.values()) >= 106
    assert all("ok:" in said[name] for name in MADE)
    with_sinks = [re.findall(r"n_sink +(\d+)", line) for line in said.values() if "ok:" in line]
    assert all(first == "0" and second != "0" for first, second in with_sinks) and {
        second for _, second in with_sinks
    } == {"1", "4", "64"}


@pytest.mark.parametrize("name", WALKED + MADE)
def test_walk_of_sequence_operations(random_models, name, everything):
    n_seeds, n_steps = (5, 30) if everything else (2, 12)
    for first in (0, 8):  # seeds 0 to 7 are without sink tokens, 8 to 15 with
        lines = run(
            native.binary("test-hwkv"),
            "walk",
            model(random_models, name),
            "--seeds",
            first,
            first + n_seeds - 1,
            "--steps",
            n_steps,
        )
        assert len(lines) == n_seeds


@pytest.mark.parametrize("name", ["made:llama", "gemma3-dense"])
def test_drafts_are_taken_back(random_models, name, everything):
    """Two to four sequences, split (odd seeds) and unified, where rings hold little more than the windows."""
    last = 5 if everything else 1
    lines = run(native.binary("test-hwkv"), "drafts", model(random_models, name), "--seeds", 0, last, "--steps", 6)
    assert len(lines) == (last + 1) * 3


def test_training_is_refused():
    assert run(native.binary("test-hwkv"), "training", "made:llama")


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-dense", "gemma3-dense", "qwen35-dense"])
def test_sanitizers_find_nothing(random_models, sanitized, name, tmp_path):
    path = model(random_models, name)
    (tmp_path / path.name).symlink_to(path)
    options = {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    run(sanitized, "archs", tmp_path, **options)
    run(sanitized, "walk", path, "--seeds", 1, 2, "--steps", 10, **options)
    run(sanitized, "walk", path, "--seeds", 9, 10, "--steps", 10, **options)


@pytest.mark.long
def test_sanitizers_find_nothing_under_python(sanitized):
    """The parity tests with the sanitizers' library: Python itself is not built with them, so their runtimes are loaded
    before it."""
    linked = subprocess.run(["ldd", sanitized.parent / "libllama.so"], text=True, capture_output=True).stdout
    runtimes = re.findall(r"lib(?:asan|ubsan|stdc\+\+)\S* => (\S+)", linked)
    if not any("asan" in path for path in runtimes):
        pytest.skip("the sanitizers' runtimes are linked statically, which Python cannot load")
    tests = [f"{Path(__file__).parent}/test_parity.py::{name}" for name in PARITY]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        text=True,
        capture_output=True,
        timeout=850,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(runtimes),
            "HWKV_BUILD": str(sanitized.parent.parent),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(PARITY)} passed" in done.stdout


# upstream's own tests of saved states, unchanged, with and without a policy


@pytest.mark.parametrize("name", ["qwen3-dense", "gemma3-dense", "qwen35-dense"])
@pytest.mark.parametrize("policy", ["off", "windows"])
def test_upstream_state_tests(random_models, name, policy, tmp_path):
    from hwkv_llamacpp import ModelGeometry
    from hwkv_llamacpp.baselines.uniform import uniform

    path = model(random_models, name)
    value = "off"
    if policy == "windows":
        value = tmp_path / "policy.json"
        uniform(ModelGeometry.from_gguf(path), 24).save(value)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / path.name).symlink_to(path)
    try:
        program = native.binary("test-save-load-state")
    except HwkvError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [program, "--models", tmp_path / "models", "--hwkv-policy", value, "-ngl", "0", "-t", "1"],
        text=True,
        capture_output=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
