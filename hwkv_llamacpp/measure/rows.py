"""The rows of measurements: what every row says of the run, and what each kind of measurement adds to it.

The one definition of the format: what is written, read and checked, and the JSON schema. Units stand in the names:
bytes, s and ms, tokens (n_*), ts (tokens per second). A value that was not measured is None, and not in the file.
"""

import json
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, with_config
from pydantic_core import CoreSchema
from typing_extensions import Required, TypedDict

VERSION: Final = 1


class _Choice:
    """Of a Literal: messages say what there is to choose from."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        return {**schema, "description": "one of " + ", ".join(schema["enum"])}


CHOICE = _Choice()


Count = Annotated[int, Field(ge=0, description="an integer of 0 or more")]
Bytes = Annotated[int, Field(description="a number of bytes")]  # differences may be negative
Number = Annotated[float, Field(description="a number")]
Share = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
Kind = Annotated[Literal["grid", "capacity"], CHOICE]
Step = Annotated[Literal["search", "last success", "first failure", "process"], CHOICE]
Phase = Annotated[Literal["prefill", "decode"], CHOICE]
Status = Annotated[Literal["ok", "out of memory", "timeout", "failed"], CHOICE]
Text = str


@with_config(ConfigDict(extra="forbid", strict=True))
class Gpu(TypedDict):
    """A GPU of the machine."""

    name: Text
    memory_bytes: Count


@with_config(ConfigDict(extra="forbid", strict=True))
class Machine(TypedDict, total=False):
    """The machine, without its name."""

    system: Required[Text]  # such as "Linux x86_64"
    cpu: Text
    n_cpus: Count
    memory_bytes: Count
    gpus: list[Gpu]
    driver: Text


class Row(BaseModel):
    """What every row says: what ran, and where. Each row stands alone."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, protected_namespaces=())

    kind: str  # of measurement; the first key of a line
    arm: Text  # what is compared: upstream, full, the name of a policy, ...
    round: Count = 0  # repetition
    version: Literal[1] = VERSION
    date: Text | None = None  # UTC

    commit: Text | None = None  # of this project; "+" where files differ from it
    upstream_commit: Text | None = None  # of llama.cpp
    build: Text | None = None  # configuration, such as cpu or cuda
    build_flags: list[Text] | None = None
    build_sha256: Text | None = None  # of the programs and libraries of this arm's build
    build_pair: Text | None = None  # of both builds together: what a ratio between arms needs to be equal
    machine: Machine | None = None
    model: Text | None = None  # file name
    model_sha256: Text | None = None
    model_bytes: Count | None = None


class ServerRow(Row):
    """One fresh server, one request, and how both ended."""

    kind: Kind  # grid: memory and throughput
    n_ctx: Annotated[int, Field(ge=1, description="an integer of 1 or more")]
    # of a search for the capacity; "process": a case before a run, part of no result
    step: Step | None = None

    n_ctx_train: Count | None = None
    policy: Text | None = None  # file name
    policy_fingerprint: Text | None = None
    n_sink: Count = 0
    retention: Share | None = None  # nominal, at n_ctx
    # of the configurable layers
    kv_layers: (
        list[
            Annotated[
                tuple[Count, Count, list[Count | None]],
                Field(strict=False, description="[layer, F16 K and V bytes of one KV head and token, windows]"),
            ]
        ]
        | None
    ) = None
    arguments: list[Text] | None = None  # of llama-server, without folders
    settings: dict[str, bool | int | float | Text | None] | None = None  # every parameter by name
    memory_limit_bytes: Count | None = None
    memory_limit_kind: Text | None = None  # "cgroup v2", "cgroup v1" or "address space"

    # how it ended
    status: Status = "failed"
    # the one that failed, or "end"
    phase: Annotated[Literal["start", "prefill", "decode", "end"], CHOICE] | None = None
    cause: Text | None = None
    exit_code: int | None = None  # negative: minus the signal
    wall_s: Number | None = None
    log_tail: list[Text] | None = None  # of a case that failed

    # memory, in bytes
    kv_bytes: Bytes | None = None  # allocated by the configurable layers
    kv_bytes_source: Annotated[Literal["props", "log"], CHOICE] | None = None  # exact, or to 0.01 MiB
    kv_other_bytes: Bytes | None = None  # allocated by the model's own sliding-window layers
    recurrent_bytes: Bytes | None = None
    # llama.cpp's own: {device: {model, context, compute}}, whole MiB as bytes; of a killed process what it had
    # allocated, {buffer type: ...}
    breakdown: dict[str, dict[str, Bytes]] | None = None
    predicted_kv_bytes: Bytes | None = None
    predicted_peak_bytes: Bytes | None = None
    predicted_parts: dict[str, Bytes] | None = None
    peak_bytes: Bytes | None = None  # what predicted_peak_bytes is about; peak_counts says how it was measured
    peak_counts: Text | None = None
    rss_peak_bytes: Bytes | None = None  # the kernel's high-water mark; counts file pages that are mapped
    rss_sampled_peak_bytes: Bytes | None = None
    rss_anon_peak_bytes: Bytes | None = None  # without file pages
    rss_file_peak_bytes: Bytes | None = None
    cgroup_peak_bytes: Bytes | None = None  # counts page cache of files that the process read, too
    gpu_process_peak_bytes: Bytes | None = None  # all devices together
    gpu_device_peak_bytes: list[Bytes] | None = None  # per device, whatever else runs there
    gpu_device_before_bytes: list[Bytes] | None = None
    # resident or device bytes over time
    samples: list[Annotated[tuple[float, int], Field(strict=False, description="[seconds, bytes]")]] | None = None
    n_samples: Count | None = None

    # speed
    n_prefill: Count | None = None
    n_cached: Count | None = None
    n_decode: Count | None = None
    prefill_ms: Number | None = None
    decode_ms: Number | None = None
    prefill_ts: Number | None = None
    decode_ts: Number | None = None

    @property
    def limited_bytes(self) -> int | None:
        """Peak of what the memory limit is held against: all that the control group was charged for. None where no such
        group was."""
        return self.cgroup_peak_bytes if (self.memory_limit_kind or "").startswith("cgroup") else None

    @property
    def key(self) -> tuple:
        """What makes two rows the same case: all that was asked for, and none of what came out."""
        return (
            self.kind,
            self.arm,
            self.n_ctx,
            self.round,
            self.step,
            self.model_sha256,
            self.policy_fingerprint,
            json.dumps(self.settings, sort_keys=True),
            self.memory_limit_bytes,
            self.build_pair,
            json.dumps(self.machine, sort_keys=True),
        )


class OffRow(Row):
    """bench/off.py: one llama-bench with an empty cache."""

    kind: Literal["off"] = "off"
    n_threads: Count
    n_prefill: Count
    n_decode: Count
    type_kv: Text
    flash_attn: bool
    prefill_s_per_token: Number
    decode_s_per_token: Number


class SpeedRow(Row):
    """bench/speed.py: one llama-bench at a depth."""

    kind: Literal["speed"] = "speed"
    policy_fingerprint: Text  # of the arm "policy"
    window: Count
    depth: Count
    n_threads: Count
    n_prefill: Count
    n_decode: Count
    n_ubatch: Count
    type_kv: Text
    flash_attn: bool
    prefill_s_per_token: Number
    decode_s_per_token: Number


class SinksRow(Row):
    """bench/sinks.py: the times of all steps of one cache."""

    kind: Literal["sinks"] = "sinks"
    policy: Text
    n_sink: Count
    phase: Phase
    n_prefill: Count
    n_decode: Count
    n_ubatch: Count
    n_threads: Count | None = None
    n_first: Count  # position from where on every window is full
    seconds: list[Number]


class InstructionsRow(Row):
    """bench/instructions.py: instructions of one llama-bench."""

    kind: Literal["instructions"] = "instructions"
    phase: Phase
    n_ubatch: Count
    n_threads: Count
    n_tokens: Count
    instructions_per_token: Number


class FrontierRow(Row):
    """bench/frontier.py: distortion and KV bytes of one policy and K/V type. Divergences in nats."""

    kind: Literal["frontier"] = "frontier"
    setting: Text  # what was asked for
    policy_fingerprint: Text
    n_sink: Count
    type_kv: Text
    retention: Share
    kv_bytes: Count
    text: Text
    held_out_sha256: Text
    n_ubatch: Count
    kl: Number
    kl_stderr: Number
    kl_p99: Number
    top1: Share
    nll: Number
    nll_full: Number
    n_tokens: Count
    n_positions: Count


class NeedleRow(Row):
    """bench/needle.py: exact answers of one policy at one prompt length."""

    kind: Literal["needle"] = "needle"
    policy_fingerprint: Text | None = None
    retention: Share
    n_prompt_tokens: Count
    prompts_per_distance: Count
    accuracy: Share
    accuracy_by_distance: dict[Annotated[int, Field(strict=False)], Share]


class CalibrationRow(Row):
    """bench/calibration.py: one prefill of a trace, or one calibration on it."""

    kind: Literal["calibration"] = "calibration"
    n_ubatch: Count
    n_threads: Count | None = None
    n_gpu_layers: Count | None = None
    type_k: Text
    type_v: Text
    trace_sha256: Text
    n_tokens: Count
    n_sequences: Count

    prefill_s: Number | None = None  # of the arm "prefill"

    # of a calibration
    taus: list[Number] | None = None
    sinks: list[Count] | None = None
    windows: list[Count] | None = None
    n_queries: Count | None = None
    seed: int | None = None
    choose_s: Number | None = None
    runtime_s: Number | None = None
    replay_s: Number | None = None
    held_out_s: Number | None = None
    n_layers_scored: Count | None = None
    n_layers: Count | None = None
    prefills_from_start: Number | None = None
    retention_by_tau: dict[str, Share] | None = None


AnyRow = ServerRow | OffRow | SpeedRow | SinksRow | InstructionsRow | FrontierRow | NeedleRow | CalibrationRow
ROWS: tuple[type[Row], ...] = get_args(AnyRow)
KINDS: dict[str, type[Row]] = {  # {kind: its model}
    kind: row for row in ROWS for kind in get_args(row.model_fields["kind"].annotation)
}
