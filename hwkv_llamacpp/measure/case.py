"""One measured case: a fresh llama-server, one fixed request, its end, and the ServerRow of it all.

The prompt fills the context but for the tokens to generate, as token ids of the same invented text in every arm.
Nothing is kept between cases, no prompt cache, no checkpoints; llama.cpp may not change the context or the offloading.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from ..base.names import as_text
from ..base.shape import ModelShape
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..plan import dry_run
from ..plan.planner import Plan
from ..policy.policy import Policy
from ..runtime import native
from ..runtime.server import LlamaServer, ServerOptions
from . import ending, machine
from .memory_limit import MemoryGroup, memory_group
from .prompt import prompt_tokens
from .rows import Kind, ServerRow, Step
from .sampler import Gpus, MemorySampler

MIB = 2**20
# nothing but the context may take memory; the log tells what each buffer takes
FIXED_FLAGS = ("--cache-ram", "0", "--ctx-checkpoints", "0", "-lv", "4")
N_TAIL = 12
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


@dataclass(frozen=True, eq=False)
class Arm:
    """What is compared: a build and a policy."""

    name: str
    upstream: bool = False
    path: Path | None = None  # policy file; None: no policy
    policy: Policy | None = None  # its content, None where every head is full


@dataclass(frozen=True)
class Settings:
    """All that the arms share."""

    model: Path
    n_predict: int = 64
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    load_mode: str = "none"  # mapped weights are file pages, which neither the kernel's limit nor a fair peak counts
    start_timeout_s: float = 600
    timeout_s: float = 3600  # of the whole request
    memory_limit_bytes: int | None = None

    def options(self, arm: Arm, n_ctx: int, geometry: ModelGeometry) -> ServerOptions:
        """The server's options for one case."""
        extra = [*FIXED_FLAGS, "-lm", self.load_mode]
        if n_ctx > geometry.n_ctx_train:  # llama-server caps slots at the trained context
            extra += ["--override-kv", f"{geometry.architecture}.context_length=int:{n_ctx}"]
        return ServerOptions(
            model=self.model,
            policy=None if arm.upstream else arm.path or "off",
            n_ctx=n_ctx,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_parallel=1,
            n_threads=self.n_threads,
            n_gpu_layers=self.n_gpu_layers,
            flash_attn="on",
            type_k=self.type_k,
            type_v=self.type_v,
            extra=tuple(extra),
            environment={"GGML_NO_BACKTRACE": "1"},
            upstream=arm.upstream,
            start_timeout_s=self.start_timeout_s,
        )


def measure(
    kind: Kind,
    arm: Arm,
    n_ctx: int,
    settings: Settings,
    geometry: ModelGeometry,
    *,
    round_: int = 0,
    step: Step | None = None,
    gpus: Gpus | None = None,
    plan: Plan | None = None,
    log_path: Path | None = None,
) -> ServerRow:
    """The ServerRow of one case. It always comes back: what goes wrong is its status and cause, unless the build itself
    is missing.

    plan: plan.Plan of this arm and context, if there is one.
    """
    row = describe(kind, arm, n_ctx, settings, geometry, round_, step)
    if plan:
        row.predicted_kv_bytes, row.predicted_parts = plan.kv_bytes, plan.parts()
    native.binary("llama-server", arm.upstream)
    start = time.monotonic()
    with memory_group(settings.memory_limit_bytes) as group:
        row.memory_limit_kind = group.kind if settings.memory_limit_bytes else None
        _Case(row, settings, settings.options(arm, n_ctx, geometry), group, gpus, log_path).run()
    if plan:
        row.predicted_peak_bytes = plan.gpu_bytes if on_gpu(row) else plan.total_bytes
    row.wall_s = round(time.monotonic() - start, 3)
    return row


def describe(
    kind: Kind,
    arm: Arm,
    n_ctx: int,
    settings: Settings,
    geometry: ModelGeometry,
    round_: int = 0,
    step: Step | None = None,
) -> ServerRow:
    """A ServerRow that says all that was asked for."""
    policy, options = arm.policy, settings.options(arm, n_ctx, geometry)
    return ServerRow(
        kind=kind,
        arm=arm.name,
        n_ctx=n_ctx,
        round=round_,
        step=step,
        **machine.origin(settings.model, arm.upstream),
        n_ctx_train=geometry.n_ctx_train,
        policy=as_text(arm.path.name) if policy and arm.path else None,
        policy_fingerprint=policy.fingerprint(geometry.n_layer) if policy else None,
        n_sink=policy.n_sink if policy else 0,
        retention=policy.retention(n_ctx, geometry) if policy else 1.0,
        kv_layers=[
            (x.layer, (x.head_dim_k + x.head_dim_v) * 2, list(policy.row(x) if policy else (None,) * x.n_head_kv))
            for x in geometry.configurable
        ],
        arguments=[as_text(Path(word).name) if "/" in word else word for word in options.arguments()],
        settings={
            "n_predict": settings.n_predict,
            "n_batch": settings.n_batch,
            "n_ubatch": settings.n_ubatch,
            "n_threads": settings.n_threads,
            "n_gpu_layers": settings.n_gpu_layers,
            "type_k": settings.type_k,
            "type_v": settings.type_v,
            "flash_attn": True,
            "n_parallel": 1,
            "load_mode": settings.load_mode,
        },
        memory_limit_bytes=settings.memory_limit_bytes,
    )


class _Case:
    """Runs the server and fills the row in."""

    def __init__(
        self,
        row: ServerRow,
        settings: Settings,
        options: ServerOptions,
        group: MemoryGroup,
        gpus: Gpus | None,
        log_path: Path | None,
    ) -> None:
        self.row, self.settings, self.group, self.gpus = row, settings, group, gpus
        self.server = LlamaServer(options, log_path, setup=self._setup, launched=self._launched)
        self.keep_log = log_path is not None
        self.sampler: Any = None  # MemorySampler, once the process is there
        self.pid: int | None = None
        self.timed_out_s: float | None = None
        self.phase_start = 0  # in the log
        self._parent = os.getpid()
        self._libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def _setup(self) -> None:
        """In the new process: it dies with us, even if we are killed, and lives under the limit."""
        if self._libc:
            self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != self._parent:
                os._exit(1)
        self.group.enter()

    def _launched(self, pid: int) -> None:
        self.pid = pid
        self.sampler = MemorySampler(pid, self.gpus)

    def run(self) -> None:
        row = self.row
        try:
            row.phase = "start"
            self.server.start()
            self._request()
            row.status, row.phase = "ok", "end"
        except TimeoutError:
            self._failed(self.settings.start_timeout_s)
        except (HwkvError, requests.RequestException) as error:
            if self.server.process is None:
                raise  # nothing was started: the build is missing
            self._failed(self.timed_out_s, str(error))
        finally:
            if self.sampler:
                self.sampler.stop()
                self._memory(self.sampler)
            self.server.stop()
            self._allocations()
            if not self.keep_log:
                self.server.log_path.unlink(missing_ok=True)

    def _request(self):
        row, server, n_predict = self.row, self.server, self.settings.n_predict
        self._check_server()
        row.phase, self.phase_start = "prefill", len(server.log())
        last = None
        with self._deadline():
            prompt = prompt_tokens(server, row.n_ctx - n_predict)
            body = {
                "prompt": prompt,
                "n_predict": n_predict,
                "ignore_eos": True,
                "cache_prompt": False,
                "temperature": 0,
            }
            for piece in server.stream("/completion", body, self.settings.timeout_s):
                if row.phase == "prefill" and piece.get("tokens"):
                    row.phase = "decode"
                last = piece
        timings = (last or {}).get("timings")
        if timings:
            for theirs, ours in TIMINGS.items():
                setattr(row, ours, timings.get(theirs))
        if not timings or (row.n_prefill, row.n_cached, row.n_decode) != (len(prompt), 0, n_predict):
            raise HwkvError(
                f"{len(prompt)} prompt tokens and {n_predict} generated ones expected, llama-server reports "
                f"{row.n_prefill} (and {row.n_cached} from a cache) and {row.n_decode}"
            )

    def _check_server(self):
        """It has the model and the policy of this row, in every arm; what a grouped cache holds, to the byte. Asked
        before the prompt, which the server may not survive."""
        row, props = self.row, self.server.props()
        if (model := props.get("model_path")) != as_text(self.settings.model):
            raise HwkvError(f"the server has loaded {model}, {as_text(self.settings.model)} expected")
        hwkv = props.get("hwkv")
        if (hwkv is None) != (row.arm == "upstream"):
            raise HwkvError(f"the server is {'the unpatched' if hwkv is None else 'not the unpatched'} llama-server")
        if hwkv is None:
            return
        assert row.retention is not None
        # a policy whose windows cover the context is served as full KV
        found = hwkv["fingerprint"] if hwkv["active"] else None
        if found != row.policy_fingerprint and (found or row.retention < 1):
            raise HwkvError(f"the server runs {_policy(found)}, {_policy(row.policy_fingerprint)} expected")
        if hwkv["active"]:
            row.kv_bytes, row.kv_bytes_source = hwkv["kv_bytes"], "props"

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Kills the server when the request takes too long: a hang never outlives the timeout."""

        def expire() -> None:
            self.timed_out_s = self.settings.timeout_s
            if self.server.process:
                self.server.process.kill()

        timer = threading.Timer(self.settings.timeout_s, expire)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _failed(self, timed_out_s: float | None, error: str | None = None) -> None:
        server = self.server
        if timed_out_s is None and server.process:
            with contextlib.suppress(Exception):
                server.process.wait(2)  # a connection breaks a moment before its process is gone
        found = ending.failed(server, self.pid, self.group.n_oom_kills(), timed_out_s, error, self.phase_start)
        self.row.status, self.row.cause, self.row.exit_code = (
            found.status,
            found.cause and _without_folders(found.cause),
            found.exit_code,
        )
        self.row.log_tail = [_without_folders(line[:300]) for line in server.log().splitlines()[-N_TAIL:]]

    def _memory(self, sampler: MemorySampler) -> None:
        row = self.row
        row.rss_peak_bytes, row.rss_sampled_peak_bytes = sampler.rss_peak, sampler.rss_sampled_peak
        row.rss_anon_peak_bytes, row.rss_file_peak_bytes = sampler.rss_anon_peak, sampler.rss_file_peak
        row.cgroup_peak_bytes = self.group.peak_bytes()
        if self.gpus:
            row.gpu_process_peak_bytes = sampler.gpu_process_peak
            row.gpu_device_peak_bytes, row.gpu_device_before_bytes = sampler.gpu_device_peak, self.gpus.before
        row.samples, row.n_samples = sampler.kept(), len(sampler.samples)
        offloads = self.gpus and (row.build or "").startswith("cuda")
        for counts, value in (
            ("gpu process", row.gpu_process_peak_bytes if offloads else None),
            ("gpu devices, less what they held before", _growth(row) if offloads else None),
            ("resident set, high-water mark", row.rss_peak_bytes),
            ("resident set, sampled", row.rss_sampled_peak_bytes),
        ):
            if value is not None:
                row.peak_bytes, row.peak_counts = value, counts
                break

    def _allocations(self):
        """What the runtime said of its buffers. It prints its breakdown at a clean end only."""
        row, log = self.row, self.server.log()
        sizes = [round(float(mib) * MIB) for mib in re.findall(r"llama_kv_cache: size =\s+([\d.]+) MiB", log)]
        if sizes:
            if row.kv_bytes is None and not (
                row.policy and row.phase == "start"
            ):  # some windows' caches may be there, and others not
                row.kv_bytes, row.kv_bytes_source = sizes[0], "log"  # the model's own windows come after
            row.kv_other_bytes = max(0, sum(sizes) - row.kv_bytes) if row.kv_bytes and len(sizes) > 1 else 0
            row.recurrent_bytes = sum(
                round(float(mib) * MIB) for mib in re.findall(r"llama_memory_recurrent: size =\s+([\d.]+) MiB", log)
            )
        row.breakdown = dry_run.breakdown(log) or dry_run.buffers(log) or None


def full_policy(geometry: ModelShape) -> Policy:
    """A policy whose every head is full."""
    return Policy({layer.layer: (None,) * layer.n_head_kv for layer in geometry.configurable})


def on_gpu(row: ServerRow) -> bool:
    """True if the row's peak is that of GPU memory."""
    return (row.peak_counts or "").startswith("gpu")


def _policy(fingerprint: str | None) -> str:
    return f"policy {fingerprint}" if fingerprint else "full KV"


def _growth(row: ServerRow) -> int:
    return sum(row.gpu_device_peak_bytes or ()) - sum(row.gpu_device_before_bytes or ())


def _without_folders(text: str) -> str:
    return re.sub(r"(/[^\s/'\":;]+)+/", "", text) if text else text
