"""Builds libllama with per-KV-head windows and everything around it. Called by ./build.sh; standard library only.

.venv/                 Python environment: this package (editable), llama-cpp-python's bindings, cmake and ninja if
needed build/download/        the pinned sdist build/upstream/src     llama.cpp as the sdist carries it;
build/upstream/<configuration>/bin  unpatched programs build/hwkv/src         the same with native/ copied in;
build/hwkv/<configuration>/bin      ours build/current          link to the configuration that hwkv uses (the one built
last; not --upstream, not --sanitize)
"""

import argparse
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = ROOT / ".venv"
STAMP = "hwkv-stamp"
NATIVE = ROOT / "native"
PATCH = NATIVE / "patches" / "0001-hwkv.patch"

# where native/ goes inside a llama.cpp tree
OVERLAY = {"src": "src", "include": "include", "tests": "tests"}
# parts of the sdist's llama.cpp that no build reads
NOT_UNPACKED = ("docs/", "media/", "models/ggml-vocab")

PROGRAMS = [
    "llama-server",
    "llama-cli",
    "llama-completion",
    "llama-bench",
    "llama-batched-bench",
    "llama-perplexity",
    "llama-fit-params",
    "llama-quantize",
    "llama-gguf-split",
]
UPSTREAM_TESTS = ["test-llama-archs", "test-save-load-state"]
UPSTREAM_PROGRAMS = ["llama-server", "llama-completion", "llama-bench", "llama-batched-bench", "llama-perplexity"]

EXAMPLES = """\
commands (default: build):
  env                    only the Python environment
  demo                   build, then serve a small real model under a policy and compare it with full KV
  test [pytest args]     build what the tests need, then run them all

examples:
  ./build.sh                             CPU
  ./build.sh --cuda --cuda-arch 90       NVIDIA, also where no GPU is visible
  ./build.sh test tests/test_server.py -k slots

CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS and CMAKE_ARGS are honoured, and so is pip's own configuration.
"""


class BuildError(Exception):
    """One sentence for the user."""


def main(argv):
    parser = argparse.ArgumentParser(
        prog="./build.sh",
        description="Builds hwkv-llamacpp.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    backend = parser.add_mutually_exclusive_group()
    backend.add_argument("--cuda", action="store_true", help="build for NVIDIA GPUs")
    backend.add_argument("--vulkan", action="store_true", help="build for Vulkan")
    backend.add_argument("--metal", action="store_true", help="build for Apple GPUs")
    parser.add_argument(
        "--cuda-arch", metavar="N", help="CUDA architecture, such as 90 (default: that of the visible GPU)"
    )
    parser.add_argument(
        "--rpc",
        action="store_true",
        help="also build llama.cpp's RPC backend and ggml-rpc-server, to use devices of other machines",
    )
    parser.add_argument("--debug", action="store_true", help="unoptimised, with assertions and debug information")
    parser.add_argument("--sanitize", action="store_true", help="ASan and UBSan: libllama and our test programs only")
    parser.add_argument(
        "--upstream", action="store_true", help="build unpatched llama.cpp with the same flags, to compare with"
    )
    parser.add_argument(
        "--source",
        metavar="DIR",
        type=Path,
        help="use this llama.cpp tree instead of the pinned one (it is copied, not changed)",
    )
    parser.add_argument(
        "--jobs",
        "-j",
        metavar="N",
        type=int,
        default=os.cpu_count() or 1,
        help="compile N files at once (default: %(default)s)",
    )
    parser.add_argument("command", nargs="?", choices=["env", "demo", "test"], help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cuda_arch and not args.cuda:
        parser.error("--cuda-arch needs --cuda")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if args.sanitize and (args.cuda or args.vulkan or args.metal or args.rpc or args.upstream):
        parser.error("--sanitize works for our CPU build only")
    if args.rest and args.command == "env":
        parser.error("env takes no arguments")

    # refuses what cannot be built before anything long starts
    find_compiler()
    cmake_arguments(args, args.sanitize, None)
    if args.source:
        args.source = own_source(args.source)

    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another ./build.sh")
            fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_environment()
        if args.command != "env":
            build(args)
        if args.command == "test":
            build(args, upstream=True)
            build(args, sanitize=True)

    python = VENV / "bin" / "python"
    if args.command == "demo":
        os.execv(python, [str(python), str(VENV / "bin" / "hwkv"), "demo", *args.rest])
    if args.command == "test":
        os.chdir(ROOT)
        os.execv(python, [str(python), "-m", "pytest", *args.rest])


def say(text):
    print(f"build.sh: {text}", flush=True)


def upstream_pins():
    """native/UPSTREAM as a dict."""
    return dict(line.split("=", 1) for line in (NATIVE / "UPSTREAM").read_text().split())


def digest(*parts):
    """A short hash of strings and file contents."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:16]


# ---- Python environment ----------------------------------------------------------------------------------------------


def prepare_environment():
    """.venv with the package, the stock bindings and the build tools. Does nothing when its stamp is current."""
    pins = upstream_pins()
    stamp = VENV / STAMP
    # the path is part of it: scripts and the editable install hold absolute paths
    wanted = digest(ROOT / "pyproject.toml", NATIVE / "UPSTREAM", str(ROOT), sys.version)
    if stamp.exists() and stamp.read_text() == wanted and find_tool("cmake") and find_tool("ninja"):
        return
    say("preparing .venv")
    make_environment()
    tools = ["setuptools>=64", "wheel", "scikit-build-core>=0.9.2"]
    tools += [name for name in ("cmake", "ninja") if not find_tool(name)]
    pip("install", *tools, goal="install the build tools")
    pip("install", "--no-build-isolation", "-e", f"{ROOT}[test]", goal="install the package's dependencies")
    sdist = fetch_sdist(pins)
    # the bindings are plain ctypes: with LLAMA_BUILD off nothing is compiled, and they load our libllama
    pip(
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--force-reinstall",
        str(sdist),
        goal="install the llama-cpp-python bindings",
        CMAKE_ARGS="-DLLAMA_BUILD=OFF",
    )
    stamp.write_text(wanted)


def make_environment():
    """A .venv that works, without packages if it is new. Its stamp, which says what is installed, also says that this
    project made it: whatever else has its place is never emptied, nor is anything installed there."""
    stamp = VENV / STAMP
    if VENV.is_symlink() or VENV.exists() and not stamp.exists() and any(VENV.iterdir()):
        what = f"a link to {os.path.realpath(VENV)}" if VENV.is_symlink() else "an environment"
        raise BuildError(f"{VENV} is {what} that ./build.sh did not make and leaves alone: move it away and run again.")
    works = environment_works()
    VENV.mkdir(exist_ok=True)
    stamp.write_text("unfinished")
    if works:
        return
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != stamp:
            path.unlink()
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True)
    if made.returncode != 0:
        raise BuildError(
            f"{sys.executable} cannot make a virtual environment: install its venv module"
            " (Debian: apt install python3-venv)."
        )


def environment_works():
    """False for a missing, broken or moved .venv (its programs start with the absolute path of its Python)."""
    python, script = VENV / "bin" / "python", VENV / "bin" / "hwkv"
    if script.exists() and str(VENV) not in script.read_text():
        return False
    return python.exists() and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0


def find_tool(name):
    """Full path of a build tool, from .venv first, or None."""
    return shutil.which(name, path=os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)]))


def pip(*args, goal, **environment):
    log = BUILD / "pip.log"
    env = dict(os.environ, PATH=f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}", **environment)
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with open(log, "a") as file:
        file.write(f"$ pip {shlex.join(args)}\n{done.stdout}\n")
    if done.returncode != 0:
        if "DO NOT MATCH THE HASHES" in done.stdout:
            raise BuildError("the package index served an sdist whose hash is not the one pinned in native/UPSTREAM.")
        if re.search("connection (broken|error)|NewConnectionError|Max retries exceeded", done.stdout):
            raise BuildError(
                f"pip could not {goal}: the package index cannot be reached (network, proxy, pip's configuration?);"
                f" see {log}."
            )
        reasons = [line[7:].rstrip(".") for line in done.stdout.splitlines() if line.startswith("ERROR: ")]
        raise BuildError(f"pip could not {goal} ({reasons[-1] if reasons else 'no reason given'}); see {log}.")


def fetch_sdist(pins):
    """Path of the llama-cpp-python sdist with the pinned hash; downloaded once, through pip."""
    folder = BUILD / "download"
    path = folder / f"llama_cpp_python-{pins['llama_cpp_python']}.tar.gz"
    if not path.exists():
        say(f"fetching {path.name}")
        folder.mkdir(exist_ok=True)
        requirement = folder / "requirements.txt"
        requirement.write_text(f"llama-cpp-python=={pins['llama_cpp_python']} --hash=sha256:{pins['sdist_sha256']}\n")
        # without isolation pip asks the installed scikit-build-core for the metadata: no second environment, no
        # compiler
        pip(
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "llama-cpp-python",
            "--require-hashes",
            "-r",
            str(requirement),
            "-d",
            str(folder),
            goal=f"fetch {path.name}",
        )
    with open(path, "rb") as file:
        found = hashlib.sha256()
        while chunk := file.read(1 << 20):
            found.update(chunk)
    if found.hexdigest() != pins["sdist_sha256"]:
        raise BuildError(
            f"{path} has sha256 {found.hexdigest()}, not the one pinned in native/UPSTREAM: delete it and run again."
        )
    return path


# ---- source trees ----------------------------------------------------------------------------------------------------


def own_source(folder):
    """The llama.cpp tree that --source names."""
    folder = folder.expanduser().resolve()
    if not (folder / "src" / "llama-model.cpp").exists():
        raise BuildError(f"--source {folder} is not a llama.cpp tree.")
    return folder


def commit_of(folder):
    """Short commit of a user's own tree; "unknown" where it is no repository."""
    if not (folder / ".git").exists() or not shutil.which("git"):
        return "unknown"
    said = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def pristine_source(pins, source):
    """The llama.cpp tree that nothing is changed in."""
    if source:
        return source
    tree, stamp = BUILD / "upstream" / "src", BUILD / "upstream" / "src-stamp"
    if tree.exists() and stamp.exists() and stamp.read_text() == pins["sdist_sha256"]:
        return tree
    sdist = fetch_sdist(pins)
    say("unpacking vendor/llama.cpp")
    partial = BUILD / "upstream" / "src.partial"
    for old in (partial, tree):
        shutil.rmtree(old, ignore_errors=True)
    prefix = f"llama_cpp_python-{pins['llama_cpp_python']}/vendor/llama.cpp/"
    with tarfile.open(sdist) as tar:
        for member in tar:
            name = member.name.removeprefix(prefix)
            if name == member.name or not member.isfile() or name.startswith(NOT_UNPACKED) or ".." in name.split("/"):
                continue
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.extractfile(member).read())
            path.chmod(member.mode & 0o755 | 0o600)
    partial.rename(tree)
    stamp.write_text(pins["sdist_sha256"])
    return tree


def files_below(folder):
    """Relative paths of the files in a source tree; version control and build folders left out."""
    for at, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f != ".git" and not (at == str(folder) and f.startswith("build"))]
        for name in files:
            yield os.path.relpath(os.path.join(at, name), folder)


def hwkv_source(pristine, tree):
    """Makes `tree` = `pristine` + native/ + the patch. Writes only files whose content differs, so ninja rebuilds only
    what it must; what an older native/ or patch left is taken back."""
    overlay = {}
    for part, place in OVERLAY.items():
        if (NATIVE / part).is_dir():
            overlay.update(
                {f"{place}/{path}": (NATIVE / part / path).read_bytes() for path in files_below(NATIVE / part)}
            )
    if PATCH.exists():

        def read(path):
            if path in overlay:
                return overlay[path]
            return (pristine / path).read_bytes() if (pristine / path).exists() else None

        try:
            overlay.update(patched(PATCH, read))
        except BuildError as error:
            raise BuildError(f"{PATCH.relative_to(ROOT)} does not apply to {pristine}: {error}.") from None

    wanted = set(files_below(pristine)) | set(overlay)
    for path in set(files_below(tree)) - wanted if tree.exists() else ():
        (tree / path).unlink()
    for path in wanted:
        target = tree / path
        if path in overlay:
            if not target.exists() or target.read_bytes() != overlay[path]:
                write(target, overlay[path])
        elif not target.exists() or not filecmp.cmp(pristine / path, target, shallow=False):
            write(target, (pristine / path).read_bytes(), (pristine / path).stat().st_mode)


def patched(patch, read):
    """{path: new content} of the files that a patch changes or adds. `read(path)` gives a file's old content, or None.

    `git apply` works on copies in a temporary folder, where it finds neither a repository around it, below whose root
    it would skip paths in silence, nor anybody's settings for line ends and white space.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree, home = Path(temporary).resolve() / "tree", Path(temporary).resolve() / "home"
        tree.mkdir()
        home.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "LC_ALL": "C"}
        environment |= {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(tree.parent),
        }

        def git_apply(*options):
            command = ["git", "apply", *options, str(patch.resolve())]
            try:
                done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
            except FileNotFoundError:
                raise BuildError("git is missing (Debian: apt install git)") from None
            if done.returncode != 0:
                errors = [
                    line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")
                ]
                raise BuildError("; ".join(errors[:2]) or f"git apply ended with {done.returncode}")
            return done.stdout

        paths = [line.split("\t", 2)[2] for line in git_apply("--numstat", "-z").split("\0")[:-1]]
        for path in paths:
            if (old := read(path)) is not None:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(old)
        git_apply()
        if gone := [path for path in paths if not (tree / path).exists()]:
            raise BuildError(f"it removes {gone[0]}, which is not supported")
        return {path: (tree / path).read_bytes() for path in paths}


def write(path, data, mode=None):
    """Whole or not at all: an interrupted run leaves no half file that looks new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    if mode is not None:
        partial.chmod(mode & 0o777 | 0o600)
    os.replace(partial, path)


# ---- configuration ---------------------------------------------------------------------------------------------------


def find_compiler():
    """[path, version line] of the C++ compiler, which must know C++17."""
    command = shlex.split(os.environ.get("CXX", "")) or [
        next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")
    ]
    source = (
        "#include <filesystem>\n#include <optional>\n"
        "int main() { if constexpr (sizeof(int) > 1) { return std::optional<int>(0).value(); } }\n"
    )
    try:
        tried = subprocess.run(
            [*command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=source, capture_output=True, text=True
        )
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        tried = None
    if tried is None or tried.returncode != 0:
        raise BuildError(
            f"no C++17 compiler: {command[0]!r} is missing or too old; install g++ or clang"
            " (Debian: apt install g++), or set CXX."
        )
    return [shutil.which(command[0]), *command[1:], *version[:1]]


def compiler_launcher():
    """CMake arguments for ccache. A launcher that the user set is left alone, and a ccache that cannot work is not
    used."""
    if (
        any(name.endswith("_COMPILER_LAUNCHER") and name.startswith("CMAKE_C") for name in os.environ)
        or "_COMPILER_LAUNCHER" in os.environ.get("CMAKE_ARGS", "")
        or "ccache" in os.environ.get("CXX", "")
    ):
        return []
    ccache = find_tool("ccache")
    if not ccache:
        return []
    probe = BUILD / "ccache-probe.c"
    probe.write_text("int x;\n")
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        works = (
            subprocess.run(
                [ccache, *compiler, "-c", str(probe), "-o", str(probe.with_suffix(".o"))], capture_output=True
            ).returncode
            == 0
        )
    except OSError:
        works = False
    if not works:
        say("ccache does not work here and is not used")
        return []
    return [f"-DCMAKE_{language}_COMPILER_LAUNCHER={ccache}" for language in ("C", "CXX", "CUDA")]


def cuda_arguments(arch):
    """CMake arguments for CUDA; checks nvcc and the architecture before a long build starts."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    for setting in ("CUDACXX", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if setting in os.environ:
            nvcc = (
                os.environ[setting]
                if setting == "CUDACXX"
                else shutil.which("nvcc", path=f"{os.environ[setting]}/bin") or nvcc
            )
    if not nvcc:
        raise BuildError("--cuda needs the CUDA toolkit: nvcc is neither on PATH nor in /usr/local/cuda/bin.")
    gpu = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout
        if shutil.which("nvidia-smi")
        else ""
    )
    found = sorted({cap.replace(".", "") for cap in gpu.split() if re.fullmatch(r"\d+\.\d", cap)})
    archs = arch.replace(",", ";").split(";") if arch else found
    if not archs:
        raise BuildError(
            "--cuda finds no GPU here: name the architecture to build for with --cuda-arch, such as --cuda-arch 90."
        )
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    for name in archs:
        match = re.fullmatch(r"(\d{2,3})[af]?(-real|-virtual)?", name)
        if not match or known and f"compute_{match[1]}" not in known:
            numbers = ", ".join(k.removeprefix("compute_") for k in known)
            raise BuildError(
                f"--cuda-arch {name} is not an architecture that {nvcc} can build"
                f" for{f' ({numbers})' if known else ''}."
            )
    archs = [name if "-" in name else f"{name}-real" for name in archs]
    arguments = [
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(archs)}",
        "-DGGML_CUDA_NCCL=OFF",
    ]
    libraries = Path(nvcc).absolute().parent.parent / "lib64"
    if (libraries / "libcublas.so").exists():  # they are found where they are, whether the loader knows them or not
        arguments.append(f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{libraries}")
    if not found:
        # without a driver there may be no libcuda to link, and a binary linked to it could not even start
        arguments.append("-DGGML_CUDA_NO_VMM=ON")
    return arguments


def cmake_arguments(args, sanitize, commit):
    backend = (
        "cpu" if sanitize else "cuda" if args.cuda else "vulkan" if args.vulkan else "metal" if args.metal else "cpu"
    )
    arguments = [
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_TESTS=ON",
        "-DGGML_CCACHE=OFF",
        # every binary finds the libraries beside it, wherever the folder is moved
        f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DGGML_METAL={'ON' if backend == 'metal' else 'OFF'}",
    ]
    if sys.platform.startswith("linux"):
        # DT_RPATH, not DT_RUNPATH: an old libllama or libggml on LD_LIBRARY_PATH must not win over ours
        flags = f"{os.environ.get('LDFLAGS', '')} -Wl,--disable-new-dtags".strip()
        arguments += [f"-DCMAKE_EXE_LINKER_FLAGS={flags}", f"-DCMAKE_SHARED_LINKER_FLAGS={flags}"]
    if commit:
        # not that of the repository that build/ happens to lie in
        arguments += ["-DGIT_EXE=", "-DLLAMA_BUILD_NUMBER=0", f"-DLLAMA_BUILD_COMMIT={commit}"]
    if backend == "cuda":
        arguments += cuda_arguments(args.cuda_arch)
    if backend == "vulkan":
        arguments.append("-DGGML_VULKAN=ON")
    name = backend
    if args.rpc and not sanitize:
        name += "-rpc"
        arguments.append("-DGGML_RPC=ON")
    if sanitize:
        name += "-sanitize"
        flags = "-O1 -g1 -fno-omit-frame-pointer"
        arguments += [
            "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            f"-DCMAKE_C_FLAGS_RELWITHDEBINFO={flags}",
            f"-DCMAKE_CXX_FLAGS_RELWITHDEBINFO={flags}",
        ]
        arguments += [f"-D{part}_SANITIZE_{kind}=ON" for part in ("LLAMA", "GGML") for kind in ("ADDRESS", "UNDEFINED")]
    elif args.debug:
        name += "-debug"
        arguments.append("-DCMAKE_BUILD_TYPE=Debug")
    else:
        arguments.append("-DCMAKE_BUILD_TYPE=Release")
    return name, arguments + shlex.split(os.environ.get("CMAKE_ARGS", ""))


def configure(source, folder, arguments, compiler, env):
    """Runs cmake where the configuration is new or has changed. A changed compiler, ninja or place starts over, because
    CMake cannot take such a change into an old cache."""
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    flags = {name: os.environ[name] for name in ("CC", "CFLAGS", "CXXFLAGS", "CUDACXX") if name in os.environ}
    identity = {"source": str(source), "folder": str(folder), "compiler": compiler, "ninja": ninja, "flags": flags}
    config = {**identity, "arguments": arguments}
    record = folder / "hwkv-configuration.json"
    old = json.loads(record.read_text()) if record.exists() else {}
    if old == config and (folder / "build.ninja").exists():
        return
    for key in identity if old else ():
        if old.get(key) != config[key]:
            say(f"configuring {folder.relative_to(BUILD)} anew: {key} changed")
            break
    else:
        say(f"configuring {folder.relative_to(BUILD)}")
    # arguments that are gone must not live on in the cache either
    (folder / "CMakeCache.txt").unlink(missing_ok=True)
    shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    done = subprocess.run(
        [cmake, "-S", str(source), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (folder / "configure.log").write_text(done.stdout)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith("CMake Error")), len(lines))
        reason = " ".join(line.strip() for line in lines[at + 1 : at + 6] if line.strip()) or "no reason given"
        raise BuildError(f"cmake cannot configure this build ({reason.rstrip('.')}); see {folder / 'configure.log'}.")
    record.write_text(json.dumps(config, indent=1))


def build(args, upstream=None, sanitize=None):
    """Brings one configuration up to date."""
    upstream = args.upstream if upstream is None else upstream
    sanitize = args.sanitize if sanitize is None else sanitize
    pins = upstream_pins()
    pristine = pristine_source(pins, args.source)
    suffix = f"-{pristine.name}-{digest(str(pristine))[:6]}" if args.source else ""
    base = BUILD / f"{'upstream' if upstream else 'hwkv'}{suffix}"
    source = pristine
    if not upstream:
        source = base / "src"
        hwkv_source(pristine, source)
    ours = sorted(path.stem for path in (NATIVE / "tests").glob("test-*.cpp"))
    if upstream:
        targets = ["llama", *UPSTREAM_PROGRAMS, *UPSTREAM_TESTS]
    elif sanitize:
        targets = ["llama", *ours]
    else:
        targets = ["llama", *PROGRAMS, *UPSTREAM_TESTS, *ours]
    if args.rpc and not sanitize:
        targets.append("ggml-rpc-server")

    name, arguments = cmake_arguments(args, sanitize, commit_of(pristine) if args.source else pins["llama_cpp_commit"])
    folder = base / name
    # relative paths and no working directory in ccache's keys: the upstream and the patched build, or two checkouts,
    # share
    env = dict(os.environ, CCACHE_BASEDIR=str(ROOT), CCACHE_NOHASHDIR="1")
    configure(source, folder, arguments + compiler_launcher(), find_compiler(), env)
    say(f"building {folder.relative_to(BUILD)}")
    status = subprocess.run([find_tool("ninja"), "-C", str(folder), f"-j{args.jobs}", *targets], env=env).returncode
    if status != 0:
        raise BuildError(f"the build of {folder} failed: the compiler's message is above.")
    if not upstream and not sanitize:
        link = BUILD / "current.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(BUILD))
        os.replace(link, BUILD / "current")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("error: interrupted; run ./build.sh again to continue.", file=sys.stderr)
        sys.exit(130)
