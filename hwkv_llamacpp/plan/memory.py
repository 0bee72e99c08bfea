"""Whether this machine can hold a context's KV at all.

llama.cpp finds out late: it first makes the bookkeeping of every cell, which takes most of a minute for two billion.
"""

import re
import subprocess

import psutil

from ..errors import HwkvError
from ..policy.footprint import Footprint
from ..runtime import native

GIB = 2**30


def beyond(what: str, footprint: Footprint) -> str | None:
    """One sentence if the KV of a Footprint is larger than all memory of this machine, else None. what: the context, in
    the user's words."""
    n_bytes = footprint.kv_bytes + footprint.own_windows_bytes
    host = psutil.virtual_memory().total
    if n_bytes <= host:
        return None
    gpus = gpu_bytes()
    if n_bytes <= host + gpus:
        return None
    has = f"{host / GIB:,.1f} GiB of memory" + (f" and {gpus / GIB:,.1f} GiB on GPUs" if gpus else "")
    return f"{what} takes at least {n_bytes / GIB:,.1f} GiB of KV, this machine has {has}"


def gpu_bytes() -> int:
    """Memory of all devices that the build in use can offload to; 0 without a build."""
    try:
        if not native.has_gpu():
            return 0
        program = native.binary("llama-server")
    except HwkvError:
        return 0
    done = subprocess.run([program, "--list-devices"], capture_output=True, text=True, errors="replace")
    return sum(devices(done.stdout)) * 2**20


def devices(text: str) -> list[int]:
    """MiB of each device that `llama-server --list-devices` prints."""
    return [int(mib) for mib in re.findall(r"^ +\S+: .*\((\d+) MiB, \d+ MiB free\)$", text, re.MULTILINE)]
