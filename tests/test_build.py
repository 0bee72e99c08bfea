"""build.sh: sources, patch and messages. Nothing here compiles."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from hwkv_llamacpp.errors import HwkvError
from hwkv_llamacpp.runtime import native

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
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


@pytest.fixture
def apply_to(tmp_path):
    """apply_to(text of x.txt, or None without one) -> {path: new content}"""

    def run(text, diff=DIFF):
        path = tmp_path / "test.patch"
        path.write_bytes(diff)
        return build.patched(path, {"x.txt": text}.get)

    return run


def test_patch_changes_and_adds_files(apply_to):
    assert apply_to(OLD) == {"x.txt": NEW, "sub/new.txt": b"first\nsecond"}


def test_patch_finds_hunks_that_moved(apply_to):
    assert apply_to(b"more\n" * 7 + OLD)["x.txt"] == b"more\n" * 7 + NEW
    assert apply_to(OLD[len(b"line 1\n") :])["x.txt"] == NEW[len(b"line 1\n") :]


def test_patch_conflict_names_file_and_line(apply_to):
    def refused(*arguments):
        with pytest.raises(build.BuildError) as caught:
            apply_to(*arguments)
        return str(caught.value)

    assert refused(OLD.replace(b"line 22", b"line 99")) == "patch failed: x.txt:20; x.txt: patch does not apply"
    assert refused(None) == "x.txt: No such file or directory"
    assert refused(OLD, b"no patch") == 'No valid patches in input (allow with "--allow-empty")'
    deletion = b"--- a/x.txt\n+++ /dev/null\n@@ -1,30 +0,0 @@\n" + b"".join(b"-" + x for x in OLD.splitlines(True))
    assert refused(OLD, deletion) == "it removes x.txt, which is not supported"


def test_patch_whatever_is_around(apply_to, tmp_path, monkeypatch):
    """Below another repository, whose own settings, and the user's, would change line ends and white space."""
    outer, home = tmp_path / "outer", tmp_path / "home"
    (outer / "tmp").mkdir(parents=True)
    home.mkdir()
    subprocess.run(["git", "init", "-q", outer], check=True)
    (outer / ".gitattributes").write_text("* text eol=crlf\n")
    for folder in (home, outer / ".git"):
        name = ".gitconfig" if folder == home else "config"
        with open(folder / name, "a") as file:
            file.write(
                "[core]\n autocrlf = true\n eol = crlf\n whitespace = trailing-space\n[apply]\n whitespace = fix\n"
            )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(outer / "tmp"))
    diff = DIFF.replace(b"+line five\n", b"+line five  \n")
    new = NEW.replace(b"line five\n", b"line five  \n")
    expected = {"x.txt": new, "sub/new.txt": b"first\nsecond"}
    assert apply_to(OLD, diff) == expected
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    assert apply_to(OLD, diff) == expected
    (tmp_path / "link").symlink_to(outer / "tmp")  # a folder that has another name
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    assert apply_to(OLD, diff) == expected
    assert list((outer / "tmp").iterdir()) == []


def test_patch_without_git(apply_to, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.BuildError, match="^git is missing"):
        apply_to(OLD)


def test_our_patch_adds_every_line(tmp_path):
    """Lines of the result against those of the patch, file by file."""
    pristine = ROOT / "build" / "upstream" / "src"
    if not build.PATCH.exists() or not pristine.exists():
        pytest.skip("needs the patch and the unpacked source (./build.sh)")

    def read(path):
        return (pristine / path).read_bytes() if (pristine / path).exists() else None

    ours = build.patched(build.PATCH, read)
    assert set(ours) == set(re.findall(r"^\+\+\+ b/(.+)$", build.PATCH.read_text(), re.MULTILINE))
    for path, new in ours.items():
        part = build.PATCH.read_text().split(f"+++ b/{path}\n")[1].split("\ndiff --git ")[0].splitlines()
        added = [line[1:] for line in part if line.startswith("+")]
        removed = [line[1:] for line in part if line.startswith("-")]
        old, new = (Counter(text.decode().splitlines()) for text in (read(path) or b"", new))
        assert new == old + Counter(added) - Counter(removed)


# the environment


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(build, "VENV", tmp_path / "checkout" / ".venv")
    (tmp_path / "checkout").mkdir()
    return tmp_path / "checkout"


def real_environment(path):
    """An environment of somebody else, with a package in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (path / "lib" / "precious.py").write_text("mine\n")


def files(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_an_environment_of_somebody_else_is_left_alone(checkout, tmp_path, linked, broken):
    """Whether it works or not: the old way emptied one whose Python had gone."""
    theirs = tmp_path / "theirs" if linked else build.VENV
    real_environment(theirs)
    if linked:
        build.VENV.symlink_to(theirs)
    if broken:
        (theirs / "bin" / "python").unlink()
    before = files(theirs)
    what = f"a link to {theirs}" if linked else "an environment"
    for call in (build.make_environment, lambda: subprocess_build(checkout)):
        with pytest.raises(build.BuildError) as caught:
            call()
        assert str(caught.value) == (
            f"{build.VENV} is {what} that ./build.sh did not make and leaves alone: move it away and run again."
        )
        assert files(theirs) == before and build.VENV.is_symlink() == linked


def subprocess_build(checkout):
    """./build.sh env of a checkout, as BuildError."""
    for name in ("build.sh", "scripts/build.py", "native/UPSTREAM", "pyproject.toml"):
        (checkout / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    done = subprocess.run([checkout / "build.sh", "env"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    raise build.BuildError(done.stderr.removeprefix("error: ").removesuffix("\n"))


def test_a_link_to_an_environment_of_another_checkout(checkout, tmp_path):
    """Its stamp says that this project made it, but not for this checkout."""
    real_environment(tmp_path / "other")
    (tmp_path / "other" / build.STAMP).write_text("0123456789abcdef")
    build.VENV.symlink_to(tmp_path / "other")
    before = files(tmp_path / "other")
    with pytest.raises(build.BuildError, match="is a link to .*/other that ./build.sh did not make"):
        build.make_environment()
    assert files(tmp_path / "other") == before


def test_our_own_environment_is_made_and_made_again(checkout):
    build.make_environment()
    assert build.environment_works() and (build.VENV / build.STAMP).exists()
    (build.VENV / "bin" / "hwkv").write_text(f"#!{build.VENV}/bin/python\n")
    kept = build.VENV / "lib" / "kept.py"
    kept.write_text("")
    build.make_environment()  # it works: nothing is lost
    assert kept.exists()
    for path in (build.VENV / "bin").glob("python*"):
        path.unlink()
    build.make_environment()
    assert build.environment_works() and not kept.exists()
    assert (build.VENV / build.STAMP).read_text() == "unfinished"
    (build.VENV / "bin" / "hwkv").write_text("#!/somewhere/else/.venv/bin/python\n")  # the checkout was moved
    build.make_environment()
    assert build.environment_works() and not (build.VENV / "bin" / "hwkv").exists()


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
    with pytest.raises(
        build.BuildError, match=r"0001-hwkv.patch does not apply to .*patch failed: src/a.cpp:20; .*\.$"
    ):
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
            "error: --cuda finds no GPU here: name the architecture to build for with --cuda-arch, such as --cuda-arch"
            " 90.\n",
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
