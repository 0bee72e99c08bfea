"""Per-KV-head windows for llama.cpp's KV cache.

    >>> from hwkv_llamacpp import ModelGeometry, Policy
    >>> geometry = ModelGeometry.from_gguf("model.gguf")     # needs no build
    >>> policy = Policy.load("policy.json")
    >>> policy.check(geometry)

``Llama`` is llama_cpp.Llama on our libllama with one more argument, ``policy``, and
``calibrate`` finds a policy for a model. Both are imported on first use, because they
need the native build.
"""

import importlib
from typing import Any

from .errors import HwkvError
from .gguf import embed as _embed  # noqa: F401 (teaches Policy.load() to read GGUF files)
from .gguf.geometry import ModelGeometry
from .policy.policy import Policy

__version__ = "0.2.0"
__all__ = ["HwkvError", "Llama", "ModelGeometry", "Policy", "calibrate"]

_ON_FIRST_USE = {"Llama": ".runtime.llama", "calibrate": ".calibration.calibrate"}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_FIRST_USE])
