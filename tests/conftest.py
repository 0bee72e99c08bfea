"""Models and helpers that several tests share, and which tests are run."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # as many processes as cores: a second thread of each would only wait for the first (read when NumPy is imported)
    os.environ.update(dict.fromkeys(("OMP_THREAD_LIMIT", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import pytest
from gguf import GGUFValueType, GGUFWriter

DATA = Path(__file__).parent / "data"

# A shell that starts tests in the background has SIGINT ignored, and every process that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# which tests


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="also the tests marked long, and random walks at their full length"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all") or any("::" in word for word in config.args):  # one that is named is meant
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="session")
def everything(request):
    """True with --all: random walks have their full length."""
    return request.config.getoption("--all")


# real models


@pytest.fixture(scope="session")
def mini_hybrid():
    """Path of a trained qwen35 miniature: layers 3 and 7 of 8 take windows, 4 KV heads of 64."""
    return DATA / "mini-hybrid-f16.gguf"


@pytest.fixture(scope="session")
def smollm2():
    """Path of SmolLM2-135M-Instruct: dense, 30 layers of 3 KV heads."""
    from hwkv_llamacpp.gguf import testmodels

    return testmodels.smollm2()


@pytest.fixture(scope="session")
def gemma3():
    """Path of Gemma 3 270M: layers 5, 11 and 17 of 18 take windows, 1 KV head of 256."""
    from hwkv_llamacpp.gguf import testmodels

    return testmodels.gemma3()


# made-up models


@pytest.fixture(scope="session")
def random_models():
    """Paths of small models with random weights, one or two of every architecture that llama.cpp's own fixture can
    make.

    They take 900 MB and half a minute, so they stay under build/ for the next run. The seed is fixed: the fixture's own
    choice is another one each time, and with it would be every error that the tests measure.
    """
    from hwkv_llamacpp import HwkvError
    from hwkv_llamacpp.runtime import native

    seed = 1
    folder = native.ROOT / "build" / "random-models" / f"seed-{seed}"
    if not folder.exists():
        try:
            program = native.binary("test-llama-archs")
        except HwkvError as error:
            pytest.skip(str(error))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            made = Path(fresh) / "models"
            made.mkdir()
            subprocess.run([program, "-s", str(seed), "-o", made], check=True, capture_output=True, timeout=600)
            made.rename(folder)
    paths = sorted(folder.glob("*.gguf"))
    assert len(paths) > 100
    return paths


def write_gguf(path, architecture, keys=(), tensors=(), alignment=None):
    """Writes a GGUF with the official writer.

    keys: {name without the architecture's prefix, or with "general."/"tokenizer."/...: value}; lists become
    u32 arrays (or bool, or string), a GGUFValueType pair (value, type) is taken as it is.
    tensors: {name: NumPy array}.
    """
    writer = GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, value in dict(keys).items():
        key = name if name.startswith(("general.", "tokenizer.", "split.", "hwkv.", "x.")) else f"{architecture}.{name}"
        _add(writer, key, value)
    for name, data in dict(tensors).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add(writer, key, value):
    if isinstance(value, tuple):
        writer.add_key_value(key, *value)
    elif isinstance(value, list):
        item = GGUFValueType.get_type(value[0])
        item = GGUFValueType.UINT32 if item == GGUFValueType.INT32 else item
        writer.add_key_value(key, value, GGUFValueType.ARRAY, item)
    else:
        type_ = GGUFValueType.get_type(value)
        writer.add_key_value(key, value, GGUFValueType.UINT32 if type_ == GGUFValueType.INT32 else type_)


@pytest.fixture
def metadata_gguf(tmp_path):
    """metadata_gguf("llama", block_count=4, ...): a GGUF without tensors. `keys` takes names with dots."""

    def make(architecture, keys=(), **more):
        defaults = {"context_length": 32768, "embedding_length": 1024, "block_count": 4, "attention.head_count": 8}
        path = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}.gguf"
        return write_gguf(path, architecture, {**defaults, **dict(keys), **more})

    return make


# the command


@pytest.fixture
def hwkv(capsys):
    """hwkv("info", path) -> (exit code, stdout, stderr), in this process."""
    from hwkv_llamacpp.cli.main import main

    def run(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def hwkv_process():
    """hwkv_process("info", path): the command in a process of its own, as a finished subprocess.run."""

    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "hwkv_llamacpp", *map(str, words)],
            text=True,
            capture_output=True,
            timeout=120,
            **options,
        )

    return run


# file systems


@pytest.fixture
def tmpfs(tmp_path):
    """tmpfs("1m") mounts a file system of that size and returns its folder; tmpfs(..., read_only=True) takes no
    files."""
    mounted = []

    def mount(size, read_only=False):
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        options = f"size={size}" + (",ro" if read_only else "")
        done = shutil.which("mount") and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
        )
        if not done or done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip() if done else 'no mount command'}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)
