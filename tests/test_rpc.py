"""Devices of other machines: a policy served over llama.cpp's RPC backend, its layers split over two servers, answers
as the local run does."""

import os
import re
import socket
import subprocess
import time
from contextlib import ExitStack

import pytest
from answers import ask, difference
from minilang import needle_prompt

from hwkv_llamacpp import ModelGeometry
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions, free_port

pytestmark = pytest.mark.long


BUILD = native.ROOT / "build" / "hwkv" / "cpu-rpc"


@pytest.fixture
def rpc_build(monkeypatch):
    if not (BUILD / "bin" / "ggml-rpc-server").exists():
        pytest.skip(f"{BUILD} is missing: run ./build.sh --rpc")
    monkeypatch.setenv("HWKV_BUILD", str(BUILD))


@pytest.fixture
def rpc_servers(rpc_build, tmp_path):
    """ "HOST:PORT,HOST:PORT" of two servers on the loopback address."""
    addresses = []
    with ExitStack() as stack:
        for i in range(2):
            port = free_port()
            log = stack.enter_context(open(tmp_path / f"rpc-{i}.log", "w"))
            process = subprocess.Popen(
                [BUILD / "bin" / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_for_port(port, process)
            addresses.append(f"127.0.0.1:{port}")
        yield ",".join(addresses)


def wait_for_port(port, process):
    for _ in range(200):
        assert process.poll() is None, "ggml-rpc-server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("ggml-rpc-server does not listen")


def test_layers_on_two_rpc_servers_give_the_local_logits(rpc_servers, mini_hybrid, tmp_path):
    path = tmp_path / "policy.json"
    pattern(ModelGeometry.from_gguf(mini_hybrid), by_layer={3: [64, None, 200, 64], 7: [100, 64, None, 64]}).save(path)
    text = needle_prompt(7, 1500, 900)[0]
    answers, kv = {}, {}
    for name, flags in (("local", ()), ("rpc", ("--rpc", rpc_servers, "-ngl", "99", "-ts", "1,1"))):
        options = ServerOptions(
            model=mini_hybrid,
            policy=path,
            n_ctx=2048,
            n_ubatch=128,
            n_parallel=1,
            n_threads=1,
            flash_attn="on",
            type_k="f32",
            type_v="f32",
            extra=("-lv", "4", *flags),
        )
        with LlamaServer(options) as server:
            prompt = server.post("/tokenize", {"content": text})["tokens"][:1100]
            answers[name] = ask(server, prompt)
            kv[name] = server.props()["hwkv"]
            log = server.log()
    for address in rpc_servers.split(","):  # both hold KV
        assert re.search(rf"llama_kv_cache: +RPC\d+\[{re.escape(address)}\] KV buffer size", log)
    assert kv["rpc"] == kv["local"] and kv["local"]["active"]
    largest, parted_at, _ = difference(answers["rpc"], answers["local"])
    assert parted_at is None and largest < 1e-3
