"""build.sh: sources, patch and messages. Nothing here compiles."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hwkv_llamacpp.errors import HwkvError
from hwkv_llamacpp.runtime import native

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
apply_patch = importlib.import_module("apply_patch")
build = importlib.import_module("build")

OLD = b"".join(b"line %d\n" % i for i in range(1, 31))
DIFF = b"""\
diff --git a/x.txt b/x.txt
--- a/x.txt
+++ b/x.txt
@@ -3,5 +3,6 @@ line 2
 line 3
 line 4
-line 5
+line five
+line five and a half
 line 6
 line 7
@@ -20,3 +21,2 @@
 line 20
-line 21
 line 22
diff --git a/sub/new.txt b/sub/new.txt
new file mode 100644
--- /dev/null
+++ b/sub/new.txt
@@ -0,0 +1,2 @@
+first
+second
\\ No newline at end of file
"""
NEW = OLD.replace(b"line 5\n", b"line five\nline five and a half\n").replace(b"line 21\n", b"")


def apply_to(text):
    return apply_patch.apply(DIFF, {"x.txt": text}.get)


def test_patch_changes_and_adds_files():
    assert apply_to(OLD) == {"x.txt": NEW, "sub/new.txt": b"first\nsecond"}


def test_patch_finds_hunks_that_moved():
    assert apply_to(b"more\n" * 7 + OLD)["x.txt"] == b"more\n" * 7 + NEW
    assert apply_to(OLD[len(b"line 1\n") :])["x.txt"] == NEW[len(b"line 1\n") :]


def test_patch_conflict_names_file_and_hunk():
    with pytest.raises(
        apply_patch.PatchError, match=r"^x\.txt, hunk 2 \(@@ -20,3 \+21,2 @@\) finds no matching lines$"
    ):
        apply_to(OLD.replace(b"line 22", b"line 99"))
    with pytest.raises(apply_patch.PatchError, match="x.txt does not exist, which hunk 1 "):
        apply_patch.apply(DIFF, lambda path: None)


def test_our_patch_does_what_git_apply_does(tmp_path):
    pristine = ROOT / "build" / "upstream" / "src"
    if not build.PATCH.exists() or not pristine.exists() or not shutil.which("git"):
        pytest.skip("needs the patch, the unpacked source (./build.sh) and git")
    patch = build.PATCH.read_bytes()

    def read(path):
        return (pristine / path).read_bytes() if (pristine / path).exists() else None

    ours = apply_patch.apply(patch, read)
    for path in ours:
        if read(path) is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(read(path))
    subprocess.run(
        ["git", "apply", "-"],
        input=patch,
        cwd=tmp_path,
        env=dict(os.environ, GIT_CEILING_DIRECTORIES=str(tmp_path.parent)),
        check=True,
    )
    assert ours == {path: (tmp_path / path).read_bytes() for path in ours}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A small upstream tree, a native/ folder and the place of their union."""
    pristine, mine = tmp_path / "pristine", tmp_path / "native"
    (pristine / "src").mkdir(parents=True)
    (pristine / "src" / "a.cpp").write_bytes(OLD)
    (pristine / "src" / "b.cpp").write_bytes(b"int b;\n")
    (mine / "src").mkdir(parents=True)
    (mine / "patches").mkdir()
    (mine / "src" / "mine.cpp").write_bytes(b"int mine;\n")
    monkeypatch.setattr(build, "NATIVE", mine)
    monkeypatch.setattr(build, "PATCH", mine / "patches" / "0001-hwkv.patch")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    return pristine, mine, tmp_path / "tree"


def age(tree):
    """Makes every file old, so that a rewritten one can be told."""
    for path in tree.rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))


def rewritten(tree):
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and path.stat().st_mtime > 1}


def test_only_what_changed_is_rewritten(sources):
    pristine, mine, tree = sources
    diff = DIFF.replace(b"x.txt", b"src/a.cpp")
    build.PATCH.write_bytes(diff)
    build.hwkv_source(pristine, tree)
    assert (tree / "src" / "a.cpp").read_bytes() == NEW
    assert (tree / "src" / "mine.cpp").exists() and (tree / "sub" / "new.txt").exists()

    age(tree)
    build.hwkv_source(pristine, tree)
    assert rewritten(tree) == set()

    (mine / "src" / "mine.cpp").write_bytes(b"int mine2;\n")
    build.hwkv_source(pristine, tree)
    assert rewritten(tree) == {"src/mine.cpp"}

    age(tree)
    build.PATCH.unlink()
    (mine / "src" / "mine.cpp").unlink()
    build.hwkv_source(pristine, tree)
    assert rewritten(tree) == {"src/a.cpp"}
    assert (tree / "src" / "a.cpp").read_bytes() == OLD
    assert not (tree / "src" / "mine.cpp").exists() and not (tree / "sub" / "new.txt").exists()


def test_a_patch_that_does_not_apply_changes_nothing(sources):
    pristine, mine, tree = sources
    build.hwkv_source(pristine, tree)
    age(tree)
    build.PATCH.write_bytes(DIFF.replace(b"x.txt", b"src/a.cpp").replace(b"line 21", b"line 99"))
    with pytest.raises(build.BuildError, match=r"0001-hwkv.patch does not apply to .*src/a.cpp, hunk 2 .*\.$"):
        build.hwkv_source(pristine, tree)
    assert rewritten(tree) == set()


def test_wrong_hash_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BUILD", tmp_path)
    (tmp_path / "download").mkdir()
    with tarfile.open(tmp_path / "download" / "llama_cpp_python-0.0.1.tar.gz", "w:gz"):
        pass
    with pytest.raises(build.BuildError, match="not the one pinned in native/UPSTREAM"):
        build.fetch_sdist({"llama_cpp_python": "0.0.1", "sdist_sha256": "0" * 64})


def run_build(*words, **environment):
    return subprocess.run(
        [str(ROOT / "build.sh"), *words], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_an_index_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BUILD", tmp_path)
    with pytest.raises(
        build.BuildError, match=r"^pip could not fetch it: the package index cannot be reached .*pip\.log\.$"
    ):
        build.pip(
            "download",
            "no-such-package-of-hwkv",
            goal="fetch it",
            PIP_INDEX_URL="http://127.0.0.1:9/simple",
            PIP_RETRIES="1",
        )


def test_own_source_that_is_no_llama_cpp(tmp_path):
    done = run_build("--source", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: --source {tmp_path} is not a llama.cpp tree.\n"


def test_own_source_tells_its_own_commit(tmp_path):
    assert build.commit_of(tmp_path) == "unknown"
    if not shutil.which("git"):
        pytest.skip("needs git")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert len(build.commit_of(tmp_path)) >= 7 and head.startswith(build.commit_of(tmp_path))


@pytest.fixture
def toolkit(tmp_path):
    """PATH with an nvcc that knows two architectures, and no GPU."""
    for name, text in (
        ("nvcc", "echo compute_80; echo compute_90"),
        ("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ["--cuda"],
            "error: --cuda finds no GPU here: name the architecture to build for with --cuda-arch, such as --cuda-arch 90.\n",
        ),
        (["--cuda", "--cuda-arch", "turbo"], "error: --cuda-arch turbo is not an architecture that "),
        (["--cuda", "--cuda-arch", "120"], "error: --cuda-arch 120 is not an architecture that "),
    ],
)
def test_cuda_without_a_gpu(toolkit, words, sentence):
    done = run_build(*words, PATH=toolkit)
    assert done.returncode == 1
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1


def test_cuda_architecture_becomes_a_cmake_argument(toolkit, monkeypatch):
    monkeypatch.setenv("PATH", toolkit)
    arguments = build.cuda_arguments("90")
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in arguments and "-DGGML_CUDA_NO_VMM=ON" in arguments


def test_a_cuda_toolkit_that_the_loader_does_not_know(toolkit, tmp_path, monkeypatch):
    (tmp_path / "cuda" / "lib64").mkdir(parents=True)
    (tmp_path / "cuda" / "lib64" / "libcublas.so").touch()
    (tmp_path / "cuda" / "bin").mkdir()
    (tmp_path / "nvcc").rename(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("PATH", toolkit)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    assert f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{tmp_path / 'cuda' / 'lib64'}" in build.cuda_arguments("90")


def test_no_compiler_is_one_sentence():
    done = run_build(CXX="/nonexistent/c++")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no C++17 compiler: '/nonexistent/c++'") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--cuda-arch", "90"],
        ["--jobs", "0"],
        ["--sanitize", "--cuda"],
        ["--cuda", "--vulkan"],
        ["--nonsense"],
        ["env", "x"],
    ],
)
def test_bad_usage_exits_2(words):
    done = run_build(*words)
    assert done.returncode == 2 and "error:" in done.stderr


def test_help_needs_no_build():
    done = run_build("--help")
    assert done.returncode == 0 and "--cuda-arch" in done.stdout and "demo" in done.stdout


def test_a_launcher_of_the_user_is_left_alone(monkeypatch):
    monkeypatch.setenv("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
    assert build.compiler_launcher() == []


# ---- what was built
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bin_dir():
    try:
        return native.build_dir() / "bin"
    except HwkvError as error:
        pytest.skip(str(error))


def test_second_run_compiles_nothing(bin_dir):
    if bin_dir.parent != ROOT / "build" / "hwkv" / "cpu":
        pytest.skip("another configuration is in use")
    done = run_build()
    assert done.returncode == 0, done.stderr
    # llama.cpp looks at its (absent) web UI every time; nothing may follow from that
    assert not re.search(r"\] (Building|Linking)", done.stdout), done.stdout


def test_version_names_the_pinned_commit(bin_dir):
    done = subprocess.run([bin_dir / "llama-server", "--version"], capture_output=True, text=True)
    assert build.upstream_pins()["llama_cpp_commit"] in done.stdout + done.stderr


def test_binaries_work_after_a_move_and_beside_other_builds(bin_dir, tmp_path):
    """From a folder with a space, with another build's libraries first on LD_LIBRARY_PATH, only the moved files are
    loaded."""
    moved = tmp_path / "moved here" / "bin"
    shutil.copytree(
        bin_dir,
        moved,
        symlinks=True,
        ignore=lambda folder, names: [n for n in names if n.startswith(("llama-", "test-")) and n != "llama-server"],
    )
    decoy = tmp_path / "old"
    shutil.copytree(
        native.build_dir(upstream=True) / "bin",
        decoy,
        symlinks=True,
        ignore=lambda folder, names: [n for n in names if ".so" not in n],
    )
    environment = dict(os.environ, LD_LIBRARY_PATH=str(decoy))
    listed = subprocess.run(["ldd", moved / "llama-server"], env=environment, capture_output=True, text=True).stdout
    paths = [
        line.split("=>")[1].split(" (")[0].strip()
        for line in listed.splitlines()
        if "libllama" in line or "libggml" in line
    ]
    assert paths and all(path.startswith(str(moved)) for path in paths), paths
    assert subprocess.run([moved / "llama-server", "--version"], env=environment, capture_output=True).returncode == 0


def test_foreign_libraries_are_named():
    maps = (
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 1   /home/x/build here/bin/libllama.so.0\n"
        "7f0000002000-7f0000003000 r-xp 00000000 08:01 2   /opt/old/libggml-base.so\n"
        "7f0000004000-7f0000005000 r-xp 00000000 08:01 3   /usr/lib/libc.so.6\n"
    )
    assert native.foreign_libraries(maps, Path("/home/x/build here/bin")) == ["/opt/old/libggml-base.so"]


def test_missing_build_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HWKV_BUILD", str(tmp_path))
    with pytest.raises(HwkvError, match="holds no build: run .*build.sh"):
        native.library()


def test_where_the_unpatched_build_cannot_be_is_said(monkeypatch, tmp_path):
    """Rather than comparing a build with itself."""
    for group in ("moved", "hwkv", "upstream"):
        (tmp_path / group / "cpu" / "bin").mkdir(parents=True)
    monkeypatch.setenv("HWKV_BUILD", str(tmp_path / "hwkv" / "cpu"))
    assert native.build_dir(upstream=True) == tmp_path / "upstream" / "cpu"
    monkeypatch.setenv("HWKV_BUILD", str(tmp_path / "moved" / "cpu"))
    with pytest.raises(HwkvError, match="where its unpatched build is cannot be told"):
        native.build_dir(upstream=True)
