"""What llama.cpp logs while a block runs, and the reason for a failure in it.

llama.cpp has one log callback for the whole process and calls it from any thread. So there is one of ours, which is
never freed: it hands each text to the block that the thread is in, and to the callback that was set before where there
is none.
"""

import ctypes
import re
import threading
from contextlib import contextmanager

from . import native

_local = threading.local()  # .collecting: a list, and whether its texts are logged as before, too
# The callbacks that ours stands in for, and their arguments, by the argument that ours was set with: who sets another
# one may put ours back later, and it then stands in for what it did before.
_before = {}


@contextmanager
def texts(echo=False):
    """A list that fills with what llama.cpp logs in this thread while the block runs. echo: it is logged as before,
    too."""
    _install()
    outer, collected = getattr(_local, "collecting", None), []
    _local.collecting = collected, echo
    try:
        yield collected
    finally:
        _local.collecting = outer


def reason(collected):
    """The sentence in such a list that says why a model could not be loaded, or a context not be made."""
    for pattern in (
        r"(?:error loading model|failed to initialize the context): (.+)",
        r".*\b(?:error|failed)\b.*",
        r".*\S.*",
    ):
        if found := re.findall(pattern, "".join(collected)):
            return found[-1].strip()
    return "no reason given"


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _record(level, text, key):
    collected, echo = getattr(_local, "collecting", None) or ([], True)
    callback, argument = _before.get(key) or (native.load()._logger.llama_log_callback, None)
    if getattr(_local, "handing_on", False):  # to one that hands on to the one before it: ours
        callback(level, text, argument)
        return
    collected.append(text.decode(errors="replace"))
    if echo:
        _local.handing_on = True
        try:
            callback(level, text, argument)
        finally:
            _local.handing_on = False


def _install():
    llama_cpp = native.load()
    ours = ctypes.cast(_record, llama_cpp.llama_log_callback)
    now, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(now), ctypes.byref(argument))
    if _address(now) != _address(ours):
        key = len(_before) + 1
        _before[key] = now, argument
        llama_cpp.llama_log_set(ours, key)


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value
