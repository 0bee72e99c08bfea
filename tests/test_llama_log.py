"""llama.cpp's log, which is one for the whole process, seen by the block and the thread that asked for it."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.runtime import llama_log, native
from hwkv_llamacpp.runtime.context import Model

llama_cpp = native.load()


def logged_by_loading(path):
    with llama_log.texts() as texts:
        assert not llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    return "".join(texts)


def test_each_thread_has_its_own(tmp_path):
    """Many blocks that begin and end while others log."""

    def load(i):
        path = tmp_path / f"missing-{i}.gguf"
        with pytest.raises(HwkvError, match=rf"failed to load model from {path}$"):
            Model(path)
        return str(path), logged_by_loading(path)

    with ThreadPoolExecutor(8) as pool:
        for path, log in pool.map(load, range(400)):
            assert path in log
            assert log.count("missing-") == log.count(path)


def test_blocks_within_blocks(tmp_path):
    with llama_log.texts() as outer:
        assert "inner.gguf" in logged_by_loading(tmp_path / "inner.gguf")
        assert not outer
        llama_cpp.llama_model_load_from_file(b"/outer.gguf", llama_cpp.llama_model_default_params())
    assert "/outer.gguf" in "".join(outer)


def test_the_users_own_callback_stays(tmp_path):
    """It sees what no block collects, and what a block passes on."""
    seen, data = [], ctypes.create_string_buffer(b"own")

    @llama_cpp.llama_log_callback
    def own(level, text, argument):
        seen.append((text.decode(), ctypes.cast(argument, ctypes.c_char_p).value))

    before, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(argument))
    llama_cpp.llama_log_set(own, ctypes.cast(data, ctypes.c_void_p))
    try:
        assert "collected.gguf" in logged_by_loading(tmp_path / "collected.gguf")
        assert not seen
        with llama_log.texts(echo=True) as texts:
            llama_cpp.llama_model_load_from_file(b"/echoed.gguf", llama_cpp.llama_model_default_params())
        assert "/echoed.gguf" in "".join(texts)
        assert [text for text, _ in seen] == texts
        llama_cpp.llama_model_load_from_file(b"/outside.gguf", llama_cpp.llama_model_default_params())
        assert "/outside.gguf" in seen[-1][0] + seen[-2][0]
        assert {value for _, value in seen} == {b"own"}
    finally:
        llama_cpp.llama_log_set(before, argument)


@pytest.mark.parametrize("careful", [True, False])
def test_a_callback_that_hands_on_to_ours(tmp_path, capfd, monkeypatch, careful):
    """As libraries do that keep the callback they find. Each text passes once, and llama-cpp-python's own has the last
    word."""
    monkeypatch.setattr(
        llama_cpp._logger.logger, "level", 0
    )  # it says nothing any more once a Llama was made with verbose=False
    logged_by_loading(tmp_path / "first.gguf")
    before, argument, seen = llama_cpp.llama_log_callback(), ctypes.c_void_p(), []
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(argument))

    @llama_cpp.llama_log_callback
    def own(level, text, _):
        seen.append(text.decode())
        before(level, text, argument if careful else None)

    llama_cpp.llama_log_set(own, None)
    try:
        with llama_log.texts(echo=True) as texts:
            llama_cpp.llama_model_load_from_file(b"/echoed.gguf", llama_cpp.llama_model_default_params())
        assert seen == texts and "/echoed.gguf" in "".join(texts)
        assert capfd.readouterr().err.count("error loading model") == 1
    finally:
        llama_cpp.llama_log_set(before, argument)


@pytest.mark.parametrize(
    "log, expected",
    [
        ("", "no reason given"),
        ("loaded\n\n", "loaded"),
        ("f: failed to open x\nload: error loading model: no such file\nload: failed to load model\n", "no such file"),
        ("init: failed to initialize the context: too large\nfailed", "too large"),
        ("one\nf: failed to allocate 3 bytes\nlast words\n", "f: failed to allocate 3 bytes"),
    ],
)
def test_reason(log, expected):
    assert llama_log.reason(list(log)) == expected  # a text may be any part of a line


def test_nothing_is_said_at_exit(mini_hybrid):
    """Objects that are freed when the interpreter ends still log."""
    program = f"""
from hwkv_llamacpp import Llama
from hwkv_llamacpp.runtime.context import Model
llm = Llama({str(mini_hybrid)!r}, n_ctx=256, verbose=False)
context = Model({str(mini_hybrid)!r}).context(None, 256)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
