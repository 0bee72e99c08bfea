"""What llama.cpp logs while a block runs, and the reason for a failure in it.

llama.cpp has one log callback for the whole process, and calls it from any thread. So ours is one for the process, too,
and is never freed. It hands each text to the block that the thread is in. Outside of blocks it hands the text to the
callback that was set before.
"""

import ctypes
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from . import native

_local = threading.local()  # .collecting: a list, and whether its texts are logged as before, too
# The callbacks that ours has taken the place of, each with its argument. Each time ours is set with a new key as its
# argument. Who replaces ours may put it back later, with the same key: ours then hands on to the callback of that key.
_before: dict[int, tuple[Any, Any]] = {}


@contextmanager
def texts(echo: bool = False) -> Iterator[list[str]]:
    """A list that fills with what llama.cpp logs in this thread while the block runs.

    echo: the texts are logged as before, too.
    """
    _install()
    outer = getattr(_local, "collecting", None)
    collected: list[str] = []
    _local.collecting = collected, echo
    try:
        yield collected
    finally:
        _local.collecting = outer


def reason(collected: Iterable[str]) -> str:
    """The sentence in such a list that says why a model could not be loaded, or a context could not be made."""
    for pattern in (
        r"(?:error loading model|failed to initialize the context): (.+)",
        r".*\b(?:error|failed)\b.*",
        r".*\S.*",
    ):
        if found := re.findall(pattern, "".join(collected)):
            return found[-1].strip()
    return "no reason given"


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _record(level: int, text: bytes, key: int) -> None:
    collecting: tuple[list[str], bool] = getattr(_local, "collecting", None) or ([], True)
    collected, echo = collecting
    callback, argument = _before.get(key) or (native.load()._logger.llama_log_callback, None)
    if getattr(_local, "handing_on", False):  # the callback before ours has called ours again: it comes from there
        callback(level, text, argument)
        return
    collected.append(text.decode(errors="replace"))
    if echo:
        _local.handing_on = True
        try:
            callback(level, text, argument)
        finally:
            _local.handing_on = False


def _install() -> None:
    llama_cpp = native.load()
    ours = ctypes.cast(_record, llama_cpp.llama_log_callback)
    now, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(now), ctypes.byref(argument))
    if _address(now) != _address(ours):
        key = len(_before) + 1
        _before[key] = now, argument
        llama_cpp.llama_log_set(ours, key)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
