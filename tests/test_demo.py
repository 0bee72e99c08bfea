"""hwkv demo, the main job, on its own model: at its shortest."""

import fcntl
import re
import subprocess
import sys

import pytest

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.gguf.embed import read_policy
from hwkv_llamacpp.policy.footprint import predict

pytestmark = pytest.mark.long

COMMAND = (sys.executable, "-u", "-m", "hwkv_llamacpp", "demo")


def demo(folder):
    done = subprocess.run(
        [*COMMAND, "-c", "1024", "--output", str(folder)], text=True, capture_output=True, timeout=900
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_calibrates_embeds_serves_and_compares(tmp_path):
    out = demo(tmp_path)
    policy, geometry = Policy.load(tmp_path / "policy.json"), ModelGeometry.from_gguf(testmodels.smollm2())
    policy.check(geometry)
    assert read_policy(tmp_path / "SmolLM2-135M-Instruct-hwkv.gguf") == policy
    full, kept = (predict(geometry, p, 1024).kv_bytes / 2**20 for p in (None, policy))
    assert re.search(rf"KV allocated +│ +{full:.1f} MiB │ +{kept:.1f} MiB │ +{kept / full:.2f} │", out)
    retention = re.search(r"KV cells kept at 1,024 tokens +│ +1.000 │ +([\d.]+) │", out)[1]
    assert float(retention) == round(policy.retention(1024, geometry), 3) < 0.7
    assert out.count("   full KV  ") == out.count("   policy   ") == 2

    layers = {path: path.stat().st_mtime_ns for path in (tmp_path / "calibration-256" / "layers").iterdir()}
    assert layers
    demo(tmp_path)  # finds the calibration done
    assert layers == {path: path.stat().st_mtime_ns for path in layers}


def test_a_second_demo_waits(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([*COMMAND, "--output", str(tmp_path)], stdout=subprocess.PIPE, text=True)
        line = process.stdout.readline()
        process.kill()
        process.communicate()
    assert line == f"Waiting for another hwkv demo in {tmp_path} ...\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
