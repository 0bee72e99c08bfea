"""What a measurement ran on: this machine, this checkout, this build, this model file."""

import datetime
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

from ..base.names import as_text
from ..base.places import ROOT
from ..errors import HwkvError
from ..gguf import digest
from ..runtime import native
from . import sampler


def origin(model: str | Path, upstream: bool = False) -> dict[str, Any]:
    """What every row says of where it comes from, see rows.Row: the date is now. upstream: measured with the unpatched
    build."""
    files = [(path, path.stat()) for path in digest.shards(model)]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **build(upstream),
        "build_pair": build_pair(),
        "machine": machine(),
        "model": as_text(Path(model).name),
        "model_sha256": _model_sha256(model, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in files)),
        "model_bytes": sum(stat.st_size for _, stat in files),
    }


@functools.cache
def _model_sha256(model: str | Path, *files: tuple[Path, int, int]) -> str:
    """files: what tells that the model is still the same."""
    return digest.of_model(model)


@functools.cache
def machine() -> dict[str, Any]:
    """The machine as a dict, the same for every run on it; without its name."""
    gpus = sampler.gpus()
    devices, driver = gpus.describe() if gpus else ([], None)
    about: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "n_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if devices:
        about |= {"gpus": devices, "driver": driver}
    return about


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


@functools.cache
def commit() -> str | None:
    """Short commit of this checkout, with "+" where files other than results differ from it; None without git."""
    try:
        run = functools.partial(subprocess.run, cwd=ROOT, text=True, capture_output=True)
        head = run(["git", "rev-parse", "--short", "HEAD"])
        changed = run(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"])
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def build(upstream: bool = False) -> dict[str, Any]:
    """{"build", "build_flags", "build_sha256", "upstream_commit"} of ours or of the unpatched build; the commit is that
    of llama.cpp's source."""
    return _build(native.build_dir(upstream))


def build_pair() -> str:
    """One hash of our build and, where it is there, the unpatched one: what rows must share to be compared."""
    parts = [build()["build_sha256"]]
    try:
        parts.append(build(upstream=True)["build_sha256"])
    except HwkvError:
        pass
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _build(folder: Path) -> dict[str, Any]:
    record = folder / "hwkv-configuration.json"
    flags = json.loads(record.read_text())["arguments"] if record.exists() else []
    found = hashlib.sha256()
    for path in sorted((folder / "bin").iterdir()):
        # what a server runs; the test programs beside it do not matter
        if path.name == "llama-server" or re.match(r"lib(llama|ggml|mtmd)[\w-]*\.(so|dylib)$", path.name):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    source = next((flag.partition("=")[2] for flag in flags if flag.startswith("-DLLAMA_BUILD_COMMIT=")), "unknown")
    return {
        "build": folder.name,
        "build_flags": [flag for flag in flags if "/" not in flag],
        "build_sha256": found.hexdigest(),
        "upstream_commit": source,
    }
