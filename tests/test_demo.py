"""hwkv demo, as far as it goes without calibrating: two of them do not work in one folder."""

import fcntl
import subprocess
import sys


def test_a_second_demo_waits(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-u", "-m", "hwkv_llamacpp", "demo", "--output", str(tmp_path)], stdout=subprocess.PIPE, text=True)
        line = process.stdout.readline()
        process.kill()
        process.communicate()
    assert line == f"Waiting for another hwkv demo in {tmp_path} ...\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
