"""A package of somebody else adds a calibration method and a baseline: installed, found, run from the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hwkv_llamacpp import ModelGeometry, Policy

PACKAGE = Path(__file__).parent / "data" / "even_odd"
TRACE = Path(__file__).resolve().parent.parent / "policies" / "mini-hybrid" / "trace.txt"


def install(source, folder):
    """The package in `folder`, as pip installs it."""
    copy = folder.with_name(f"{folder.name}-source")  # pip builds in the folder
    shutil.copytree(source, copy)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", folder, copy], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def hwkv_extended(tmp_path_factory):
    """hwkv("policy", ...): the command where the package is installed, as a finished subprocess.run."""
    site = install(PACKAGE, tmp_path_factory.mktemp("packages") / "site")

    def run(*words, path=site):
        command = [sys.executable, "-m", "hwkv_llamacpp", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)

    return run


@pytest.mark.parametrize("name", ["pyproject.toml", "hwkv_even_odd.py"])
def test_the_page_shows_this_package(name):
    page = (PACKAGE.parents[2] / "docs" / "extending.md").read_text()
    (shown,) = re.findall(rf"<!-- tests/data/even_odd/{re.escape(name)} -->\n```\w+\n(.*?)```\n", page, re.DOTALL)
    assert shown == (PACKAGE / name).read_text()


def test_help_has_the_method_and_its_options(hwkv_extended):
    said = hwkv_extended("calibrate", "--help").stdout
    assert "--method {leastkl,seqcalib,even-odd}" in said
    assert "--method even-odd:\n" in said and "--least S" in said
    assert "checkers" in hwkv_extended("policy", "make", "--help").stdout


def test_the_method_calibrates(hwkv_extended, mini_hybrid, tmp_path):
    """Layers 3 and 7 of the mini hybrid are odd; the score decides, and the run goes on where it is asked again."""
    words = ["calibrate", mini_hybrid, "-o", tmp_path / "p.json", "--method", "even-odd", "--least", 0.97, "--sink", 0]
    words += ["--text", TRACE, "--trace-tokens", 512, "--queries", 32, "--budget", 1, "-t", 1, "--json"]
    done = hwkv_extended(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["selected"] == {"least": 0.97, "n_sink": 0}
    policy = Policy.load(tmp_path / "p.json")
    policy.check(ModelGeometry.from_gguf(mini_hybrid))
    assert policy.provenance["method"] == "even-odd" and policy.provenance["least"] == 0.97
    (record,) = found["records"]
    assert record["distortion"]["kl"] >= 0 and 0.97 <= record["mean_score"] <= 1
    again = hwkv_extended(*words, "--force")
    assert again.returncode == 0 and json.loads(again.stdout)["records"] == found["records"]
    other = hwkv_extended(*[0.5 if word == 0.97 else word for word in words], "--force")
    assert other.returncode == 1 and "its least is 0.97, now it is 0.5" in other.stderr


def test_even_layers_get_the_shortest_window(hwkv_extended, smollm2, tmp_path):
    words = ["calibrate", smollm2, "-o", tmp_path / "p.json", "--method", "even-odd", "--windows", "16,64", "--sink", 4]
    words += ["--text", TRACE, "--trace-tokens", 128, "--queries", 8, "--budget", 1]
    done = hwkv_extended(*words)
    assert done.returncode == 0, done.stderr
    policy = Policy.load(tmp_path / "p.json")
    assert all(row == (16, 16, 16) for il, row in policy.layers.items() if il % 2 == 0)
    assert {w for il, row in policy.layers.items() if il % 2 for w in row} > {16}


def test_the_baseline(hwkv_extended, mini_hybrid, tmp_path):
    done = hwkv_extended("policy", "make", "checkers", mini_hybrid, "--window", 64, "-o", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    assert Policy.load(tmp_path / "p.json").layers == {3: (None, 64) * 2, 7: (None, 64) * 2}


def test_options_of_another_method_are_refused(hwkv_extended, mini_hybrid, tmp_path):
    words = ["calibrate", mini_hybrid, "-o", tmp_path / "p.json"]
    for method, flags, owner in (
        ("seqcalib", ["--least", 0.5], "even-odd"),
        ("even-odd", ["--taus", "0.9"], "seqcalib"),
        ("even-odd", ["--probe-tokens", 128], "leastkl"),
    ):
        done = hwkv_extended(*words, "--method", method, *flags)
        sentence = f"error: {flags[0]} is an option of the method {owner}, not of {method}\n"
        assert done.returncode == 1 and done.stderr == sentence


@pytest.mark.parametrize(
    ("old", "new", "words", "sentence"),
    [
        ("hwkv_even_odd:EvenOdd", "hwkv_even_odd:Missing", ["calibrate", "--help"], "cannot be loaded: AttributeError"),
        ("hwkv_even_odd:EvenOdd", "hwkv_even_odd:time", ["calibrate", "--help"], "a subclass of"),
        ("even-odd =", "odd-even =", ["calibrate", "--help"], "has the name 'even-odd', 'odd-even' expected"),
        ("checkers =", "uniform =", ["policy", "make", "--help"], "has the name 'checkers', 'uniform' expected"),
    ],
)
def test_a_wrong_entry_point_is_named(hwkv_extended, tmp_path, old, new, words, sentence):
    source = tmp_path / "package"
    shutil.copytree(PACKAGE, source)
    (source / "pyproject.toml").write_text((source / "pyproject.toml").read_text().replace(old, new))
    done = hwkv_extended(*words, path=install(source, tmp_path / "site"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "in package hwkv-even-odd" in done.stderr and sentence in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words", "sentence"),
    [
        ('"even-odd"', '"seqcalib"', ["calibrate", "--help"], "is called as one of package hwkv-llamacpp"),
        ('"--least"', '"--budget"', ["calibrate", "--help"], "conflicting option string: --budget"),
    ],
)
def test_names_and_options_that_are_there_already(hwkv_extended, tmp_path, old, new, words, sentence):
    source = tmp_path / "package"
    shutil.copytree(PACKAGE, source)
    for name in ("pyproject.toml", "hwkv_even_odd.py"):
        text = (source / name).read_text().replace(old, new)
        (source / name).write_text(text.replace("even-odd =", f"{new.strip(chr(34))} =") if "seqcalib" in new else text)
    done = hwkv_extended(*words, path=install(source, tmp_path / "site"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and sentence in done.stderr
