"""Row: what one measured case was and gave. The only schema; rows append to a JSONL file, one line each, and stand
alone.

Units stand in the names: bytes, ms, tokens (n_*), ts (tokens per second). A value that was not measured is None.
llama.cpp's words for the same things are mapped here and nowhere else.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import HwkvError

VERSION = 1
STATUSES = ("ok", "out of memory", "timeout", "failed")
RESULTS = STATUSES[:2]  # the others say nothing of the case, and are tried again

# llama-server's timings -> ours
TIMINGS = {
    "prompt_n": "n_prefill",
    "cache_n": "n_cached",
    "predicted_n": "n_decode",
    "prompt_ms": "prefill_ms",
    "predicted_ms": "decode_ms",
    "prompt_per_second": "prefill_ts",
    "predicted_per_second": "decode_ts",
}


@dataclass
class Row:
    """One fresh server, one request, and how both ended."""

    kind: str  # grid (memory and throughput) or capacity
    arm: str  # upstream, full, or the name of a policy
    n_ctx: int
    round: int = 0  # repetition
    step: str | None = (
        None  # capacity: "search", "last success", "first failure"; "process": a case before a run, part of no result
    )
    version: int = VERSION
    date: str | None = None  # UTC

    # what ran, and where
    commit: str | None = None
    upstream_commit: str | None = None
    build: str | None = None  # configuration, such as cpu or cuda
    build_flags: list | None = None
    build_sha256: str | None = None  # of the programs and libraries of this arm's build
    build_pair: str | None = None  # of both builds together: what a ratio between arms needs to be equal
    machine: dict | None = None
    model: str | None = None
    model_sha256: str | None = None
    model_bytes: int | None = None
    n_ctx_train: int | None = None
    policy: str | None = None  # file name
    policy_fingerprint: str | None = None
    n_sink: int = 0
    retention: float | None = None  # nominal, at n_ctx
    kv_layers: list | None = None  # [layer, F16 K and V bytes of one KV head and token, windows], configurable layers
    arguments: list | None = None  # of llama-server, without folders
    settings: dict | None = None  # every parameter by name
    memory_limit_bytes: int | None = None
    memory_limit_kind: str | None = None  # "cgroup v2", "cgroup v1" or "address space"

    # how it ended
    status: str = "failed"
    phase: str | None = None  # the one that failed, or "end"
    cause: str | None = None
    exit_code: int | None = None  # negative: minus the signal
    wall_s: float | None = None
    log_tail: list | None = None  # of a case that failed

    # memory, in bytes
    kv_bytes: int | None = None  # allocated by the configurable layers
    kv_bytes_source: str | None = None  # "props" (exact) or "log" (to 0.01 MiB)
    kv_other_bytes: int | None = None  # allocated by the model's own sliding-window layers
    recurrent_bytes: int | None = None
    breakdown: dict | None = (
        None  # llama.cpp's own: {device: {model, context, compute}}, whole MiB as bytes; of a killed process
    )
    # {buffer type: ...}, what it had allocated
    predicted_kv_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_parts: dict | None = None
    peak_bytes: int | None = None  # what predicted_peak_bytes is about; peak_counts says how it was measured
    peak_counts: str | None = None
    rss_peak_bytes: int | None = None  # the kernel's high-water mark; counts file pages that are mapped
    rss_sampled_peak_bytes: int | None = None
    rss_anon_peak_bytes: int | None = None  # without file pages
    rss_file_peak_bytes: int | None = None
    cgroup_peak_bytes: int | None = None  # counts page cache of files that the process read, too
    gpu_process_peak_bytes: int | None = None  # all devices together
    gpu_device_peak_bytes: list | None = None  # per device, whatever else runs there
    gpu_device_before_bytes: list | None = None
    samples: list | None = None  # [seconds since start, resident or device bytes]
    n_samples: int | None = None

    # speed
    n_prefill: int | None = None
    n_cached: int | None = None
    n_decode: int | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    prefill_ts: float | None = None
    decode_ts: float | None = None

    def take_timings(self, timings):
        """Copies llama-server's timings into our fields."""
        for theirs, ours in TIMINGS.items():
            setattr(self, ours, timings.get(theirs))

    @property
    def limited_bytes(self):
        """Peak of what the memory limit is held against: all that the control group was charged for. None where no such
        group was."""
        return self.cgroup_peak_bytes if (self.memory_limit_kind or "").startswith("cgroup") else None

    @property
    def key(self):
        """What makes two rows the same case: all that was asked for, and none of what came out."""
        settings = json.dumps(self.settings, sort_keys=True)
        return (
            self.kind,
            self.arm,
            self.n_ctx,
            self.round,
            self.step,
            self.model_sha256,
            self.policy_fingerprint,
            settings,
            self.memory_limit_bytes,
            self.build_pair,
            json.dumps(self.machine, sort_keys=True),
        )


BEGINNING = '{"kind": '
NAMES = {item.name for item in fields(Row)}


def append(path, row):
    """Adds one line, in one write: a killed run leaves whole lines, at worst a last one without its end."""
    path = Path(path)
    line = json.dumps({name: value for name, value in dataclasses.asdict(row).items() if value is not None}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = "\n" + line  # after a line without its end
            data = line.encode()
            if os.write(fd, data) != len(data):
                raise HwkvError(f"{path}: cannot write: the row was cut short; is the disk full?")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise HwkvError(f"{path}: cannot write: {error.strerror}") from None


def read(path, missing_ok=False):
    """The rows of a JSONL file. A line that a kill or a power failure cut short is left out, with a word on stderr; any
    other bad line is an HwkvError."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if missing_ok:
            return []
        raise HwkvError(f"{path}: cannot read: no such file") from None
    except OSError as error:
        raise HwkvError(f"{path}: cannot read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                data = json.loads(line)
            except ValueError:
                data = None
            if data is None and (line.startswith(BEGINNING) or BEGINNING.startswith(line) or not line.strip("\0")):
                print(f"{path}: line {number} was cut short and is left out", file=sys.stderr)
                continue
            rows.append(_row(data, f"{path}: line {number}"))
    return rows


def _row(data, source):
    if not isinstance(data, dict):
        raise HwkvError(f"{source}: not a row of measurements")
    if data.get("version") != VERSION:
        raise HwkvError(f"{source}: key 'version' is {data.get('version')!r}, {VERSION} expected")
    unknown, missing = sorted(set(data) - NAMES), sorted({"kind", "arm", "n_ctx"} - set(data))
    if unknown or missing:
        what = f"unknown key '{unknown[0]}'" if unknown else f"key '{missing[0]}' is missing"
        raise HwkvError(f"{source}: {what}")
    if data.get("status") not in STATUSES:
        raise HwkvError(f"{source}: key 'status' is {data.get('status')!r}, one of {', '.join(STATUSES)} expected")
    return Row(**data)
