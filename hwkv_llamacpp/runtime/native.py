"""Finds the native build, loads its libllama under llama_cpp, and wraps the C calls of llama-hwkv.h.

The build in use is the folder that HWKV_BUILD names, else ``build/current``, which ./build.sh sets. Whatever else lies
on the machine (a llama-cpp-python wheel with its own library, old files on LD_LIBRARY_PATH), the libraries that end up
in the process are that build's, or loading fails with a sentence that names the wrong file.
"""

import ctypes
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..base.places import ROOT
from ..errors import HwkvError
from ..policy.policy import Policy

# what ctypes takes as a pointer: llama_model *, llama_context *
Pointer = int | ctypes.c_void_p | None

BUILD_COMMAND = f"run {ROOT / 'build.sh'}"


def build_dir(upstream: bool = False) -> Path:
    """Folder of the build in use; with upstream, of the unpatched build with the same flags.

    HwkvError if it is not built.
    """
    named = os.environ.get("HWKV_BUILD")
    folder = Path(named).expanduser().resolve() if named else (ROOT / "build" / "current").resolve()
    if named and folder.name == "bin":
        folder = folder.parent
    if upstream:
        group = folder.parent
        if "hwkv" not in group.name:
            raise HwkvError(
                f"{folder}: where its unpatched build is cannot be told: a folder hwkv/{folder.name} expected,"
                f" with upstream/{folder.name} beside it"
            )
        folder = group.with_name(group.name.replace("hwkv", "upstream", 1)) / folder.name
    if not (folder / "bin").is_dir():
        what = f"HWKV_BUILD={named} holds no build" if named and not upstream else "the native build is missing"
        raise HwkvError(f"{what}: {BUILD_COMMAND}{' --upstream' if upstream else ''}.")
    return folder


def has_gpu() -> bool:
    """True if the build in use can offload to a GPU, or to other machines."""
    return build_dir().name not in ("cpu", "cpu-debug")


def library() -> Path:
    """Path of libllama in the build in use. HwkvError if it is not there."""
    path = build_dir() / "bin" / ("libllama.dylib" if sys.platform == "darwin" else "libllama.so")
    if not path.exists():
        raise HwkvError(f"{path} is missing: {BUILD_COMMAND}.")
    return path


def binary(name: str, upstream: bool = False) -> Path:
    """Path of a program, such as "llama-server", of the build in use. HwkvError if it is not there."""
    path = build_dir(upstream) / "bin" / name
    if not os.access(path, os.X_OK):
        raise HwkvError(f"{path} is missing: {BUILD_COMMAND}{' --upstream' if upstream else ''}.")
    return path


def foreign_libraries(maps: str, folder: Path) -> list[str]:
    """Paths of llama.cpp libraries in the text of a /proc/PID/maps that lie outside `folder`."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    ours = re.compile(r"lib(llama|ggml|mtmd)[\w-]*\.(so|dylib)")
    return sorted(p for p in paths if ours.match(os.path.basename(p)) and Path(p).resolve().parent != folder.resolve())


@functools.cache
def load() -> ModuleType:
    """The llama_cpp module on our libllama. The first call decides which build this process uses.

    HwkvError if the build is missing, is not ours, or another libllama is loaded.
    """
    path = library()
    if "llama_cpp" not in sys.modules:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(path.parent)
    try:
        import llama_cpp
    except ImportError as error:
        raise HwkvError(f"llama_cpp, the Python bindings, cannot be imported ({error}): {BUILD_COMMAND}.") from None
    except (RuntimeError, FileNotFoundError) as error:
        raise HwkvError(f"{path} cannot be loaded ({error}): {BUILD_COMMAND}.") from None
    try:
        foreign = foreign_libraries(Path("/proc/self/maps").read_text(errors="surrogateescape"), path.parent)
    except OSError:  # no /proc: trust the loader
        foreign = []
    if foreign:
        raise HwkvError(
            f"this process has {foreign[0]} loaded instead of the libraries in {path.parent}: "
            "import hwkv_llamacpp before llama_cpp, and take that file off LD_PRELOAD and LD_LIBRARY_PATH."
        )
    try:
        bind(llama_cpp.llama_cpp._lib)
    except AttributeError:
        raise HwkvError(
            f"{path} is not a build of this project (it lacks llama_hwkv_register): {BUILD_COMMAND}."
        ) from None
    return llama_cpp


def bind(lib: ctypes.CDLL) -> None:
    """Declares the functions of llama-hwkv.h on a ctypes library."""
    text = ctypes.c_char_p
    # int32_t llama_hwkv_register(const char * json, char * id, size_t n_id, char * err, size_t n_err);
    lib.llama_hwkv_register.argtypes = [text, text, ctypes.c_size_t, text, ctypes.c_size_t]
    lib.llama_hwkv_register.restype = ctypes.c_int32
    # bool llama_hwkv_active(const struct llama_context * ctx);
    lib.llama_hwkv_active.argtypes = [ctypes.c_void_p]
    lib.llama_hwkv_active.restype = ctypes.c_bool
    # int32_t llama_hwkv_info(const struct llama_context * ctx, char * buf, size_t n);
    # int32_t llama_hwkv_layers(const struct llama_model * model, char * buf, size_t n);
    for function in (lib.llama_hwkv_info, lib.llama_hwkv_layers):
        function.argtypes = [ctypes.c_void_p, text, ctypes.c_size_t]
        function.restype = ctypes.c_int32

    # int32_t llama_hwkv_select(struct llama_model * model, const char * value, char * err, size_t n_err);
    lib.llama_hwkv_select.argtypes = [ctypes.c_void_p, text, text, ctypes.c_size_t]
    lib.llama_hwkv_select.restype = ctypes.c_int32


def lib() -> ctypes.CDLL:
    """The ctypes library, with every call of llama.h and llama-hwkv.h declared."""
    return load().llama_cpp._lib


def register(policy_json: str) -> str:
    """Keeps a policy (JSON text) for this process. Returns "@<id>", a value for the kv override hwkv.policy.

    HwkvError if it is no policy.
    """
    if "\0" in policy_json:
        raise HwkvError("a policy's text holds a NUL character.")
    name, error = ctypes.create_string_buffer(64), ctypes.create_string_buffer(1024)
    if lib().llama_hwkv_register(policy_json.encode(), name, len(name), error, len(error)) != 0:
        raise HwkvError(error.value.decode(errors="replace"))
    return name.value.decode()


def select(model: Pointer, policy: Policy | str | None) -> None:
    """Sets what the contexts follow that are created on the model (a llama_model pointer) from now on.

    policy: a Policy, None for full KV, or "calibrate". HwkvError if the policy does not fit.
    """
    value = policy if isinstance(policy, str) else "off" if policy is None else register(policy.to_json())
    error = ctypes.create_string_buffer(1024)
    if lib().llama_hwkv_select(model, value.encode(), error, len(error)) != 0:
        raise HwkvError(error.value.decode(errors="replace"))


def active(ctx: Pointer) -> bool:
    """True if the context (a llama_context pointer) keeps a grouped cache."""
    return lib().llama_hwkv_active(ctx)


def info(ctx: Pointer) -> dict[str, Any]:
    """What the grouped cache of a context (a llama_context pointer) holds: bytes, groups with window, cells, layers.

    {"active": False} without one.
    """
    return _json(lib().llama_hwkv_info, ctx)


def layers(model: Pointer) -> dict[str, Any]:
    """The layers of a loaded model (a llama_model pointer), and which of them a policy may configure."""
    return _json(lib().llama_hwkv_layers, model)


def _json(function: Callable[..., int], handle: Pointer) -> dict[str, Any]:
    size = function(handle, None, 0)
    if size < 0:
        raise HwkvError(f"{function.__name__} failed: llama.cpp's log says why.")
    text = ctypes.create_string_buffer(size + 1)
    function(handle, text, len(text))
    return json.loads(text.value)
