"""hwkv serve: what it says, and what it hands to llama-server."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import requests

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.cli.serve import describe
from hwkv_llamacpp.gguf.embed import embed
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
