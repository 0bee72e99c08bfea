"""The wheel: all that the package needs is in it, and it works where there is no checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
DATA = ("hwkv_llamacpp/calibration/texts/01-story-harbour.txt", "hwkv_llamacpp/report/templates/page.html")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "checkout"  # pip leaves its build folder beside the package
    source.mkdir()
    for name in ("hwkv_llamacpp", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", folder, source], check=True, timeout=300)
    return next(folder.glob("hwkv_llamacpp-*.whl"))


def test_everything_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hwkv_llamacpp").rglob("*.py")}
    assert modules <= names and {*DATA, "hwkv_llamacpp/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "native"))]


def test_the_command_works_without_a_checkout(wheel, mini_hybrid, tmp_path):
    """The folder of the wheel's files comes first on the path, and nothing of a checkout lies beside it."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    def hwkv(*words):
        environment = {**os.environ, "PYTHONPATH": str(site), "HWKV_BUILD": str(tmp_path / "none")}
        command = [sys.executable, "-m", "hwkv_llamacpp", *map(str, words)]
        return subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=120)

    where = "import hwkv_llamacpp; print(hwkv_llamacpp.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    said = subprocess.run([sys.executable, "-c", where], env=environment, cwd=tmp_path, text=True, capture_output=True)
    assert said.stdout.startswith(str(site))
    done = hwkv("info", mini_hybrid, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["architecture"] == "qwen35"
    done = hwkv("policy", "make", "uniform", mini_hybrid, "--window", 64, "-o", tmp_path / "p.json")
    assert done.returncode == 0 and hwkv("policy", "check", mini_hybrid, tmp_path / "p.json").returncode == 0
    done = hwkv("serve", mini_hybrid)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
