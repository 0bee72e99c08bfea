"""hwkv serve: what it says, and what it hands to llama-server."""

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest
import requests

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.cli.serve import describe
from hwkv_llamacpp.gguf.embed import embed
from hwkv_llamacpp.plan import memory
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import free_port

POLICY = Policy({3: (None, 64, 64, 64)})


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """serve("M", "--policy", ...) -> (exit code, words that the program got, stderr), with a llama-server that prints
    its words."""
    folder = tmp_path / "hwkv" / "cpu" / "bin"
    folder.mkdir(parents=True)
    (folder / "llama-server").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "llama-server").chmod(0o755)
    monkeypatch.setenv("HWKV_BUILD", str(folder.parent))
    for name in ("LLAMA_ARG_HWKV_POLICY", "LLAMA_ARG_N_PARALLEL"):
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "hwkv_llamacpp", "serve", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout.split("\n")[:-1], done.stderr

    return run


@pytest.fixture
def policy(tmp_path):
    POLICY.save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_one_slot_unless_asked_otherwise(serve, mini_hybrid, policy, monkeypatch):
    code, words, err = serve(mini_hybrid, "--policy", policy, "--", "-c", 2048)
    assert (code, words) == (0, ["-m", str(mini_hybrid), "--hwkv-policy", str(policy), "-np", "1", "-c", "2048"])
    summary = POLICY.summary(ModelGeometry.from_gguf(mini_hybrid))
    assert err == f"policy {summary}; 1 slot (for more, give -np N after --)\n"
    for flag in ("-np", "--parallel"):
        code, words, err = serve(mini_hybrid, "--policy", policy, "--", flag, 3)
        assert (words[4:], err) == ([flag, "3"], f"policy {summary}\n")
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "2")
    assert "-np" not in serve(mini_hybrid)[1]


def test_the_first_line_names_the_policy(mini_hybrid, tmp_path):
    own = tmp_path / "own.gguf"
    embed(mini_hybrid, POLICY, own)
    for model, choice in ((own, None), (own, "embedded"), (mini_hybrid, own)):
        assert describe(model, choice).startswith(f"policy {POLICY.fingerprint(8)}: 3 of 8 KV heads")
    assert describe(mini_hybrid, None) == f"no policy in {mini_hybrid}: full KV, as upstream"
    assert describe(own, "off") == "no policy: full KV, as upstream"


def test_a_policy_asked_for_by_name_must_be_there(serve, hwkv, mini_hybrid):
    assert serve(mini_hybrid, "--policy", "embedded") == (1, [], f"error: {mini_hybrid}: has no embedded policy\n")
    assert hwkv("plan", mini_hybrid, "--policy", "embedded", "--formulas")[::2] == (
        1,
        f"error: {mini_hybrid}: has no embedded policy\n",
    )


def test_flags_of_the_server_go_after_two_dashes(serve, mini_hybrid):
    code, words, err = serve(mini_hybrid, "-c", 2048)
    assert (code, words) == (2, [])
    assert "error: -c 2048: flags of llama-server go after --, as in hwkv serve MODEL -- -c 32768" in err


def test_what_would_be_another_model_or_an_empty_policy(serve, mini_hybrid, tmp_path):
    assert serve(mini_hybrid, "--", "-m", "other.gguf") == (
        1,
        [],
        "error: -m: give the model as MODEL, before the --\n",
    )
    os.mkfifo(tmp_path / "pipe")
    expected = f"error: {tmp_path / 'pipe'}: not a regular file: the policy is read twice, so a file expected\n"
    assert serve(mini_hybrid, "--policy", tmp_path / "pipe") == (1, [], expected)


def test_a_context_that_no_memory_holds_is_refused_at_once(serve, mini_hybrid, policy, monkeypatch):
    """Two layers of 4 KV heads of 64: 2,048 bytes of F16 a token; under the policy 5 of 8 heads are full."""
    has = f"this machine has {psutil.virtual_memory().total / 2**30:,.1f} GiB of memory"
    start = time.monotonic()
    for words, kv in (
        (["--", "-c", "2000000000"], "3,814.7"),
        (["--", "--ctx-size", "10", "-c", "2000000000", "-np", "4"], "3,814.7"),
        (["--policy", policy, "--", "-c", "2000000000"], "2,384.2"),
        (["--", "-c", "2000000000", "-ctk", "q8_0", "--cache-type-v", "q8_0"], "2,026.6"),
    ):
        expected = f"error: -c 2000000000 on {mini_hybrid} takes at least {kv} GiB of KV, {has}\n"
        assert serve(mini_hybrid, *words) == (1, [], expected)
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "2000000000")
    assert serve(mini_hybrid)[:2] == (1, [])
    assert serve(mini_hybrid, "--", "-c", 2048)[0] == 0
    assert time.monotonic() - start < 60


def test_what_may_fit_is_left_to_the_server(serve, mini_hybrid):
    fits = psutil.virtual_memory().total // 2048 // 256 * 256
    assert serve(mini_hybrid, "--", "-c", fits)[0] == 0
    assert serve(mini_hybrid, "--", "-c", fits + 256)[0] == 1
    for more in (["-c", "0"], ["-c", "many"], ["-c", str(2**31)], ["-c", "2000000000", "--rpc", "10.0.0.1:50052"]):
        assert serve(mini_hybrid, "--", *more)[0] == 0


def test_memory_of_gpus_counts(serve, mini_hybrid, tmp_path, monkeypatch):
    gpu = tmp_path / "hwkv" / "cuda"
    (tmp_path / "hwkv" / "cpu").rename(gpu)
    (gpu / "bin" / "llama-server").write_text(
        '#!/bin/sh\n[ "$1" = --list-devices ] && cat <<E\nAvailable devices:\n'
        "  CUDA0: NVIDIA H200 (143156 MiB, 142617 MiB free)\n  CUDA1: A (B) C (4194304 MiB, 1 MiB free)\nE\n"
    )
    monkeypatch.setenv("HWKV_BUILD", str(gpu))
    assert memory.gpu_bytes() == (143156 + 4194304) * 2**20
    assert "-c 2147483647 on" not in serve(mini_hybrid, "--", "-c", 2**31 - 1)[2]  # 4,096 GiB
    assert serve(mini_hybrid, "--policy", "off", "--", "-c", 2**31 - 1, "-ctk", "f32", "-ctv", "f32")[2].endswith(
        " GiB of memory and 4,235.8 GiB on GPUs\n"
    )


def test_the_server_makes_one_slot(mini_hybrid, policy, tmp_path):
    try:
        native.binary("llama-server")
    except HwkvError as error:
        pytest.skip(str(error))
    port = free_port()
    words = [
        mini_hybrid,
        "--policy",
        policy,
        "--",
        "-c",
        2048,
        "-ub",
        128,
        "-t",
        1,
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hwkv_llamacpp", "serve", *map(str, words)], stdout=log, stderr=log
        )
    props = {}
    try:
        deadline = time.monotonic() + 60
        while "hwkv" not in props and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(requests.ConnectionError):
                props = requests.get(f"http://127.0.0.1:{port}/props", timeout=20).json()
    finally:
        process.kill()
        process.wait()
    assert props["total_slots"] == 1 and [group["cells"] for group in props["hwkv"]["groups"]] == [2048, 256]
