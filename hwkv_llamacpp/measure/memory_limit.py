"""A real limit on the memory of one process, and the peak that the kernel counted for it.

    with memory_group(3 * 2**30) as group:
        subprocess.Popen(..., preexec_fn=group.enter)

A control group where one can be made (version 2 or 1, as a child of our own), otherwise a limit on the address space,
which also counts
what is only reserved: stacks, allocator arenas, mapped files. `kind` says which.
"""

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..errors import HwkvError


class MemoryGroup:
    """Where no control group can be made: an address-space limit, or nothing at all."""

    kind: str | None = "address space"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        if limit_bytes is None:
            self.kind = None

    def enter(self) -> None:
        """Called by the child process before it becomes the server."""
        if self.limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.limit_bytes, self.limit_bytes))

    def peak_bytes(self) -> int | None:
        return None

    def n_oom_kills(self) -> int | None:
        """Processes of the group that the kernel killed for memory; None where nobody counts."""
        return None

    def close(self) -> None:
        pass


class ControlGroup(MemoryGroup):
    def __init__(self, folder: Path, kind: str, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self.kind = kind
        self.limit_bytes = limit_bytes
        if limit_bytes is not None:
            if kind == "cgroup v2":
                (folder / "memory.max").write_text(str(limit_bytes))
                limits_with_swap = [("memory.swap.max", 0)]
            else:
                (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
                limits_with_swap = [("memory.memsw.limit_in_bytes", limit_bytes)]
            for name, value in limits_with_swap:
                with contextlib.suppress(OSError):  # a kernel that does not account for swap
                    (folder / name).write_text(str(value))
        self._procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def enter(self) -> None:
        os.write(self._procs, str(os.getpid()).encode())

    def peak_bytes(self) -> int | None:
        name = "memory.peak" if self.kind == "cgroup v2" else "memory.max_usage_in_bytes"
        try:
            return int((self.folder / name).read_text())
        except OSError:  # memory.peak is younger than version 2
            return None

    def n_oom_kills(self) -> int | None:
        name = "memory.events" if self.kind == "cgroup v2" else "memory.oom_control"
        try:
            counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        except (OSError, ValueError):
            return None
        return int(counts["oom_kill"]) if "oom_kill" in counts else None

    def close(self) -> None:
        os.close(self._procs)
        for _ in range(100):  # a process that has just ended may still be counted
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)


@contextlib.contextmanager
def memory_group(limit_bytes: int | None = None) -> Iterator[MemoryGroup]:
    """A MemoryGroup that is gone when the block ends."""
    if limit_bytes is not None and limit_bytes < 2**20:
        raise HwkvError(f"a memory limit of {limit_bytes} bytes is too small for any process: 1MiB or more expected")
    group = _control_group(limit_bytes) or MemoryGroup(limit_bytes)
    try:
        yield group
    finally:
        group.close()


def _control_group(limit_bytes: int | None) -> ControlGroup | None:
    for parent, kind in _own_groups():
        _remove_left(parent)
        folder = parent / f"hwkv-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / ("memory.max" if kind == "cgroup v2" else "memory.limit_in_bytes")).exists():
                return ControlGroup(folder, kind, limit_bytes)
        except OSError:
            pass
        folder.rmdir()
    return None


def _remove_left(parent: Path) -> None:
    """Removes the groups of runs that were killed."""
    for folder in parent.glob("hwkv-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):  # its server is still ending
                folder.rmdir()


def _own_groups() -> Iterator[tuple[Path, str]]:
    """[(folder of the control group that this process is in, kind)]; of version 2 its parent, too, because a group with
    processes of its own cannot hand the memory controller on."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for _, mount, kind, options, *_ in mounts:
            folder = Path(mount + path)
            if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                yield folder, "cgroup v1"
            elif kind == "cgroup2" and not controllers:
                yield folder, "cgroup v2"
                if path != "/":
                    yield folder.parent, "cgroup v2"
