"""Why a server ended: read from its exit status, its log and the kernel, never guessed.

Only two things count as out of memory: a process that says so in its log and then fails, and a process that the kernel
killed for memory. A timeout, a crash of another kind, an abort without a word, a kill by somebody else are what they
are.
"""

import re
import subprocess
from dataclasses import dataclass

from ..runtime.server import LlamaServer
from .rows import Status

# what llama.cpp, its backends and the C++ runtime say when memory runs out
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfDeviceMemory|OutOfHostMemory|bad_alloc|insufficient memory|cannot allocate memory"
    r"|(failed|unable) to allocate (?!.*pinned)(.*buffer|compute|memory|context|graph|[\d.]+ (bytes|M))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ending:
    status: Status
    cause: str | None  # one line for people; None for "ok"
    exit_code: int | None  # negative: minus the signal; None while the process runs


def memory_line(log: str) -> str | None:
    """The first line of a log that says that memory ran out, or None."""
    for line in log.splitlines():
        if not line.startswith("$ ") and OUT_OF_MEMORY.search(line):
            return re.sub(r"^[\d.]+ [A-Z] ", "", line.strip()).rstrip(".")
    return None


def failed(
    server: LlamaServer,
    pid: int | None,
    n_oom_kills: int | None = 0,
    timed_out_s: float | None = None,
    error: str | None = None,
    since: int = 0,
) -> Ending:
    """Ending of a case that did not succeed.

    server: the LlamaServer, running or not. n_oom_kills: kills that its control group counted. timed_out_s: the time
    after which the measurement gave up. error: what the client saw. since: length of the log when the phase that failed
    began; what stands before it was survived.
    """
    code = server.process.poll() if server.process else None
    if timed_out_s is not None:
        return Ending("timeout", f"no end after {timed_out_s:g} s", code)
    if code == -9 and (killer := "the control group's limit" if n_oom_kills else kernel_kill(pid)):
        return Ending("out of memory", f"killed by the kernel: {killer}", code)
    line = memory_line(server.log()[since:])
    if line:
        return Ending("out of memory", line, code)
    return Ending("failed", server.exit_cause() or error or "no reason given", code)


def kernel_kill(pid: int | None) -> str | None:
    """The kernel's message that it killed the process for memory, or None; needs a readable kernel log."""
    try:
        log = subprocess.run(["dmesg"], text=True, capture_output=True, errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.findall(
        rf"^.*out of memory: Killed process {pid} \(llama-server\).*$", log, re.IGNORECASE | re.MULTILINE
    )
    return re.sub(r"^\[[^]]*\]\s*", "", found[-1]) if found else None
