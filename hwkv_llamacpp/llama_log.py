"""What llama.cpp logs while a block runs, and the reason for a failure in it.

llama.cpp has one log callback for the whole process and calls it from any thread. So there is one of ours, which is never freed: it hands
each text to the block that the thread is in, and to the callback that was set before where there is none.
"""

import ctypes
import re
import threading
from contextlib import contextmanager

from . import native

_local = threading.local()  # .collecting: a list, and whether its texts are logged as before, too
_before = None  # the callback that ours stands in for, and its argument


@contextmanager
def texts(echo=False):
    """A list that fills with what llama.cpp logs in this thread while the block runs. echo: it is logged as before, too."""
    _install()
    outer, collected = getattr(_local, "collecting", None), []
    _local.collecting = collected, echo
    try:
        yield collected
    finally:
        _local.collecting = outer


def reason(collected):
    """The sentence in such a list that says why a model could not be loaded, or a context not be made."""
    for pattern in (r"(?:error loading model|failed to initialize the context): (.+)", r".*\b(?:error|failed)\b.*", r".*\S.*"):
        if found := re.findall(pattern, "".join(collected)):
            return found[-1].strip()
    return "no reason given"


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _record(level, text, _):
    collected, echo = getattr(_local, "collecting", None) or ([], True)
    collected.append(text.decode(errors="replace"))
    if echo:
        callback, argument = _before
        callback(level, text, argument)


def _install():
    global _before
    llama_cpp = native.load()
    ours = ctypes.cast(_record, llama_cpp.llama_log_callback)
    now, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(now), ctypes.byref(argument))
    if _address(now) != _address(ours):
        _before = now, argument
        llama_cpp.llama_log_set(ours, None)


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value
