"""Everything in a device's memory: weights, KV of all windows, recurrent states. Any Vulkan device will do, Mesa's
software driver too.

A process uses one build, so what needs the Vulkan build's library runs in a process of its own.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from answers import ask, difference, limit
from minilang import needle_prompt

from hwkv_llamacpp import ModelGeometry
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.plan import dry_run
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

BUILD = native.ROOT / "build" / "hwkv" / "vulkan"
TESTS = Path(__file__).parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
HWKV = (sys.executable, "-m", "hwkv_llamacpp")

pytestmark = pytest.mark.timeout(3600)  # a device in software compiles its shaders for minutes


@pytest.fixture(scope="module")
def vulkan():
    """Environment variables of a process on the Vulkan build."""
    program = BUILD / "bin" / "llama-server"
    if not program.exists():
        pytest.skip(f"{program} is missing: run ./build.sh --vulkan")
    # by its number, or llama.cpp leaves out what is no GPU
    env = {
        "HWKV_BUILD": str(BUILD),
        "HWKV_TEST_GPU_LAYERS": "99",
        "GGML_VK_VISIBLE_DEVICES": os.environ.get("GGML_VK_VISIBLE_DEVICES", "0"),
    }
    listed = subprocess.run(
        [program, "--list-devices"], text=True, capture_output=True, timeout=60, env={**os.environ, **env}
    )
    if "Vulkan0" not in listed.stdout:
        pytest.skip("no Vulkan device is found (Debian's mesa-vulkan-drivers brings one in software)")
    return env


def run(*words, env, timeout_s=3000):
    done = subprocess.run(
        [str(word) for word in words],
        text=True,
        capture_output=True,
        timeout=timeout_s,
        env={**os.environ, **env},
        cwd=native.ROOT,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense"])
def test_random_models(vulkan, random_models, name):
    """Not of a hybrid: Mesa's driver takes seconds for a micro-batch of its recurrent layers. The server's model is
    one."""
    path = next(path for path in random_models if path.stem == name)
    assert run(BUILD / "bin" / "test-hwkv", "archs", path, "-ngl", 99, env=vulkan).count("ok:") == 2
    run(BUILD / "bin" / "test-hwkv", "walk", path, "--seeds", 8, 9, "--steps", 10, "-ngl", 99, env=vulkan)


def test_logits_states_and_layerwise(vulkan):
    assert "4 passed" in run(*PYTEST, "-s", TESTS / "test_device.py", env=vulkan)


@pytest.fixture
def options(mini_hybrid, tmp_path):
    """A server of the mini hybrid under a policy of four windows."""
    path = tmp_path / "policy.json"
    pattern(ModelGeometry.from_gguf(mini_hybrid), by_layer={3: [64, None, 200, 64], 7: [100, 64, None, 64]}).save(path)
    return ServerOptions(
        model=mini_hybrid,
        policy=path,
        n_ctx=1024,
        n_batch=64,
        n_ubatch=64,
        n_parallel=1,
        n_threads=1,
        n_gpu_layers=99,
        flash_attn="on",
        extra=("-lv", "4"),
        environment={"OMP_WAIT_POLICY": "passive"},
    )


def test_a_server_plans_allocates_answers_saves_and_restores(vulkan, options, tmp_path, monkeypatch):
    text, answers = needle_prompt(7, 700, 300)[0], {}
    for policy in ("off", options.policy):
        with LlamaServer(dataclasses.replace(options, policy=policy, n_gpu_layers=0)) as server:
            prompt = server.post("/tokenize", {"content": text})["tokens"][:500]
            answers["cpu", policy] = ask(server, prompt)
            cpu = server.props()["hwkv"]

    for name, value in vulkan.items():
        monkeypatch.setenv(name, value)
    options = dataclasses.replace(options, slot_save_path=f"{tmp_path}/")
    with LlamaServer(dataclasses.replace(options, policy="off")) as server:
        answers["device", "off"] = ask(server, prompt)
    with LlamaServer(options) as server:
        answer = answers["device", options.policy] = ask(server, prompt)
        saved = server.post("/slots/0?action=save", {"filename": "chat.bin"})
        here, found = server.props()["hwkv"], dry_run.parse(server.log())

    # the other kernels alone make a difference, which full KV shows
    noise = difference(answers["device", "off"], answers["cpu", "off"])[0]
    largest, parted_at, _ = difference(answer, answers["cpu", options.policy])
    print(f"log-probabilities: full KV differs by {noise:.1e} from the CPU's, the policy by {largest:.1e}")
    assert parted_at is None and largest <= limit(noise)
    assert here == cpu and here["active"]

    more = prompt + answer.tokens
    with LlamaServer(options) as server:
        assert server.post("/slots/0?action=restore", {"filename": "chat.bin"})["n_restored"] == saved["n_saved"]
        restored = ask(server, more, id_slot=0)
        largest, parted_at, _ = difference(restored, ask(server, more, cache_prompt=False))
    print(
        f"restored: read {restored.n_read} tokens; log-probabilities differ by {largest:.1e} from those of a prompt"
        " read anew"
    )
    assert restored.n_read <= 8 and parted_at is None and largest <= limit(noise)

    plan = json.loads(
        run(
            *HWKV,
            "plan",
            options.model,
            "--policy",
            options.policy,
            "-c",
            1024,
            "-b",
            64,
            "-ub",
            64,
            "-ngl",
            99,
            "--json",
            env=vulkan,
        )
    )
    devices = plan["plans"]["policy"]["devices"]
    assert devices["Vulkan0"]["KV"] == here["kv_bytes"] and "KV" not in devices["host"]
    assert devices["Vulkan0"]["recurrent"] == found["recurrent"]
    assert devices["Vulkan0"]["compute"] == found["compute"]["Vulkan0"]


@pytest.mark.timeout(7200)
def test_demo(vulkan, tmp_path):
    """At its shortest, which is 5,000 tokens to read and 400 to write: a device in software does 4 and 0.8 of them a
    second."""
    out = run(*HWKV, "demo", "-c", 1024, "--output", tmp_path, env=vulkan, timeout_s=7000)
    assert "KV allocated" in out and "   policy   " in out
    for log in ("off", "embedded"):
        text = (tmp_path / f"llama-server-{log}.log").read_text()
        assert "Vulkan0 KV buffer size" in text and "CPU KV buffer size" not in text


def test_calibration(vulkan, mini_hybrid, tmp_path):
    """The runtime's attention and the replay of what was captured are compared by the calibration itself; here its
    scores with the CPU's.

    One trace, shorter than the micro-batch that buffers are made for: Mesa 22.3's driver in software crashes when
    llama.cpp makes a larger compute buffer, because it has kept the old one bound, whose memory is gone.
    """
    text = tmp_path / "needles.txt"
    text.write_text(
        "".join(f"{prompt} {value}." for prompt, value in (needle_prompt(seed, 300, 200) for seed in range(3)))
    )
    found = {}
    for name, env, n_gpu_layers in (("cpu", {}, 0), ("device", vulkan, 99)):
        policy = tmp_path / f"{name}.json"
        run(
            *HWKV,
            "calibrate",
            mini_hybrid,
            "-o",
            policy,
            "--text",
            text,
            "--trace-tokens",
            400,
            "--windows",
            "8,16,32,64,128,200",
            "--taus",
            "0.995",
            "--queries",
            64,
            "-ub",
            512,
            "-t",
            1,
            "-ngl",
            n_gpu_layers,
            "-c",
            4096,
            env=env,
        )
        found[name] = [
            np.array(json.loads(path.read_text())["scores"]["mean"])
            for path in sorted(policy.with_suffix(".calib").glob("layers/*.json"))
        ]
    largest = [float(np.abs(a - b).max()) for a, b in zip(found["device"], found["cpu"], strict=True)]
    print(f"largest difference of a score, by layer: {', '.join(f'{x:.1e}' for x in largest)}")
    assert len(largest) == 2 and max(largest) <= 1e-3
