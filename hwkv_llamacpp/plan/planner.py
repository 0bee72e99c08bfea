"""Planner: what a server would take, before it is started, and the largest context that fits a memory size.

KV bytes come from the runtime's own rule (footprint.py), so they are exact. With the native build here, llama.cpp's dry
run gives everything else on each device and confirms the KV bytes; without it, sliding windows, recurrent state and
weights come from formulas over the GGUF's header, and compute buffers are not known. Every answer says which numbers
are formulas.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ..errors import HwkvError
from ..gguf.file import GGUFFile, open_first_shard
from ..gguf.geometry import ARCHITECTURES, PARALLEL, Keys, ModelGeometry
from ..policy.footprint import Footprint, predict
from ..policy.policy import Policy
from ..runtime import native
from . import dry_run

MIB = 2**20
PARTS = ("weights", "KV", "own windows", "other KV", "recurrent", "compute", "output", "process", "draft model")
HOST = ("Host", "CPU", "CPU_REPACK")  # buffer types in the machine's own memory
STATE_KEYS = (  # they give the size of a recurrent layer's state
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.group_count",
    "shortconv.l_cache",
    "embedding_length",
)
# what llama-server itself holds at work: threads, request, sampler; 10 to 13 MiB on SmolLM2 and Gemma 3 270M
SERVER_BYTES = 12 * MIB


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of one server. devices: {device: {part: bytes}}, parts as in PARTS; a part that is not known is
    left out."""

    context: dry_run.Context
    footprint: Footprint
    devices: dict
    group_devices: tuple  # per group of the footprint: {device: bytes}
    formulas: tuple  # parts that are formulas
    unknown: tuple  # parts that are not in the total
    checkpoint_bytes: int | None  # of one context checkpoint, at most

    @property
    def kv_bytes(self) -> int:
        return self.footprint.kv_bytes

    @property
    def total_bytes(self) -> int:
        return sum(sum(parts.values()) for parts in self.devices.values())

    @property
    def gpu_bytes(self) -> int:
        """Of all devices but the host."""
        return sum(sum(parts.values()) for name, parts in self.devices.items() if name != "host")

    def with_draft(self, draft: "Plan") -> "Plan":
        """The Plan of a server that holds a draft model, too; the draft's program is the same process."""
        devices = {name: dict(parts) for name, parts in self.devices.items()}
        for name, parts in draft.devices.items():
            own = sum(n_bytes for part, n_bytes in parts.items() if part != "process")
            devices.setdefault(name, {})["draft model"] = own
        return replace(self, devices=devices, unknown=tuple(dict.fromkeys(self.unknown + draft.unknown)))

    def parts(self) -> dict[str, int]:
        """{part: bytes} over all devices."""
        return {
            part: sum(parts[part] for parts in self.devices.values() if part in parts)
            for part in PARTS
            if any(part in parts for parts in self.devices.values())
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "n_ctx": self.footprint.n_ctx,
            "n_parallel": self.context.n_parallel,
            "kv_bytes": self.kv_bytes,
            "full_kv_bytes": self.footprint.full_kv_bytes,
            "total_bytes": self.total_bytes,
            "parts": self.parts(),
            "devices": self.devices,
            "formulas": list(self.formulas),
            "unknown": list(self.unknown),
            "groups": [
                {**group, "devices": devices}
                for group, devices in zip(self.footprint.to_dict()["groups"], self.group_devices)
            ],
            "checkpoint_bytes": self.checkpoint_bytes,
        }


class Planner:
    """Plans for one model. Contexts share what does not depend on them."""

    def __init__(self, model: str | Path, dry: bool | None = None) -> None:
        """dry: use llama.cpp's dry run; by default where the build is there and the file lists tensors."""
        self.model = Path(model)
        self.geometry = ModelGeometry.from_gguf(model)
        self.header = Header(model)
        self._whole = self.header.with_room_for_data()
        self.dry = self.header.n_tensors > 0 and is_built() if dry is None else dry
        self._weights: dict[int | None, dict[str, int]] = {}  # by n_gpu_layers
        # by n_ubatch and policy: it differs a little from run to run, and a plan must grow with its context alone
        self._resident: dict[tuple[int, str], int] = {}

    def plan(
        self,
        context: dry_run.Context,
        policy: Policy | None = None,
        process_bytes: int | None = None,
        on_gpu: bool = False,
    ) -> Plan:
        """Plan of a dry_run.Context; policy: the Policy that context.policy names; process_bytes: what the process is
        known to hold beside its buffers, where it was measured, on the first GPU or on the host."""
        footprint = predict(
            self.geometry,
            policy,
            context.n_ctx,
            n_batch=context.n_batch,
            n_ubatch=context.n_ubatch,
            n_seq_max=context.n_parallel,
            unified=context.kv_unified,
            type_k=context.type_k,
            type_v=context.type_v,
            flash_attn=context.flash_attn != "off",
        )
        sliding = footprint.own_windows_bytes
        if self.dry:
            return self._exact(context, footprint, sliding, process_bytes, on_gpu)
        parts = {
            "weights": self.header.weight_bytes,
            "KV": footprint.kv_bytes,
            "own windows": sliding,
            "recurrent": self.header.recurrent_bytes(self.geometry, context.n_parallel),
        }
        known = {part: value for part, value in parts.items() if value}
        unknown = tuple(
            part for part in (*parts, "compute", "output", "process") if part not in parts or parts[part] is None
        )
        return Plan(
            context,
            footprint,
            {"all devices": known},
            tuple({"all devices": group.bytes} for group in footprint.groups),
            tuple(known),
            unknown,
            None,
        )

    def _exact(
        self, context: dry_run.Context, footprint: Footprint, sliding: int, process_bytes: int | None, on_gpu: bool
    ) -> Plan:
        if self._whole:
            context = replace(
                context,
                model=self._whole.name,
                policy=str(self.model) if context.policy == "embedded" else context.policy,
            )
        found = dry_run.run(context)
        # what no policy can configure, such as latent attention, has no formula here; a policy's own groups must be as
        # the formula says
        other = sum(found["caches"]) - footprint.kv_bytes - sliding
        if abs(other) <= 0.006 * MIB * len(found["caches"]):
            other = 0
        elif footprint.active or other < 0:
            raise HwkvError(
                f"{self.model}: llama.cpp's dry run makes caches of {sum(found['caches']):,} bytes, the formula says "
                f"{footprint.kv_bytes + sliding:,}: please report this"
            )
        devices: dict[str, dict[str, int]] = {}

        def add(device: str, part: str, n_bytes: int) -> None:
            if n_bytes:
                parts = devices.setdefault("host" if device in HOST or device.endswith("_Host") else device, {})
                parts[part] = parts.get(part, 0) + n_bytes

        if context.n_gpu_layers not in self._weights:
            self._weights[context.n_gpu_layers] = dry_run.weights(context.model, context.n_gpu_layers)
        weights = self._weights[context.n_gpu_layers]
        elsewhere = sum(n_bytes for device, n_bytes in weights.items() if device not in HOST)
        for device, n_bytes in weights.items():
            # the tool leaves out what the CPU keeps in another layout
            rest = (self.header.weight_bytes or 0) - elsewhere if device in HOST else 0
            add(device, "weights", max(n_bytes, rest))
        at = {int(layer): device for layer, device in found["cache_devices"].items()}
        group_devices = []
        for group in footprint.groups:
            by_device: dict[str, int] = {}
            for layer, _, n_bytes in group.layers:
                add(at[layer], "KV", n_bytes)
                by_device[at[layer]] = by_device.get(at[layer], 0) + n_bytes
            group_devices.append(by_device)
        own = [layer.layer for layer in self.geometry.layers if layer.kind == "swa" and layer.layer in at]
        # these are told as a sum, and each layer has an equal part
        for part, n_bytes, places in (
            ("own windows", sliding, [at[layer] for layer in own]),
            ("other KV", other, list(at.values())),
            ("recurrent", found["recurrent"], list(found["recurrent_devices"].values())),
        ):
            for device, n_layers in Counter(places).items() if n_bytes else ():
                add(device, part, n_bytes * n_layers // len(places))
        for part in ("compute", "output"):
            for device, n_bytes in found[part].items():
                add(device, part, n_bytes)
        resident = self._resident.setdefault((context.n_ubatch, context.policy), found["resident"])
        if process_bytes is None:
            add("host", "process", resident + SERVER_BYTES)
        else:
            add(next((name for name in devices if on_gpu and name != "host"), "host"), "process", process_bytes)
        checkpoint = (
            found["hwkv"].get("checkpoint_bytes") or (found["recurrent"] + sliding) // context.n_parallel or None
        )
        return Plan(context, footprint, devices, tuple(group_devices), ("process",), (), checkpoint)


class Header:
    """What the GGUF's header tells about weights and recurrent state. Of a split model, all shards that are there."""

    def __init__(self, path: str | Path) -> None:
        file, shards = open_first_shard(path)
        with file:
            self.architecture = file.get("general.architecture")
            keys = Keys(file, self.architecture)
            self._keys = {name: keys.number(name) if keys.has(name) else None for name in STATE_KEYS}
            tensors = list(file.tensors)
            self._path, self._data_start = file.path, file.data_start
            self._lacks_data = bool(tensors) and not file.has_data and len(shards) == 1
        for shard in shards[1:] if len(shards) > 1 else ():
            with GGUFFile(shard) as file:
                tensors += file.tensors
        self._data_bytes = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
        self.n_tensors = len(tensors)
        self.weight_bytes = sum(tensor.n_bytes for tensor in tensors) if tensors else None

    def with_room_for_data(self) -> IO[bytes] | None:
        """Of a file that ends with its header, a temporary copy as long as the whole model would be, without taking
        disk: llama.cpp checks the length, and its dry run reads no data. None for a whole file."""
        if not self._lacks_data:
            return None
        n_bytes = self._data_start + self._data_bytes
        try:
            copy = tempfile.NamedTemporaryFile(suffix=".gguf")
            copy.write(self._path.read_bytes())
            copy.truncate(n_bytes)
            copy.flush()
        except OSError as error:
            raise HwkvError(
                f"{self._path}: no temporary file as long as the model, {n_bytes:,} bytes: {error.strerror}"
            ) from None
        return copy

    def recurrent_bytes(self, geometry: ModelGeometry, n_parallel: int) -> int | None:
        """F32 states of all recurrent layers, as llama_hparams::n_embd_r and n_embd_s count them; None for kinds of
        layer that this formula does not know."""
        parallel = ARCHITECTURES[self.architecture].recurrent == PARALLEL
        n_layers = sum(layer.kind == "recurrent" or parallel for layer in geometry.layers)
        if n_layers == 0:
            return 0
        if geometry.refusal:  # some of these keep more beside their states
            return None
        if self._keys["shortconv.l_cache"]:
            values = self._key("embedding_length") * (self._key("shortconv.l_cache") - 1)
        elif self._keys["ssm.inner_size"]:
            conv, inner, state = (self._key(f"ssm.{name}") for name in ("conv_kernel", "inner_size", "state_size"))
            values = (conv - 1) * (inner + 2 * (self._keys["ssm.group_count"] or 0) * state) + state * inner
        else:
            return None
        return n_layers * values * 4 * n_parallel

    def _key(self, name: str) -> int:
        value = self._keys[name]
        if value is None:
            raise HwkvError(f"{self._path}: key '{self.architecture}.{name}' is missing")
        return value


def is_built() -> bool:
    try:
        native.binary("llama-fit-params")
    except HwkvError:
        return False
    return True


def largest_context(
    plan_at: Callable[[int], Plan], limits: Sequence[int], step: int, high: int
) -> tuple[int, Plan] | None:
    """(largest n_ctx that fits, its Plan), a multiple of step up to high; None where not even one step fits.

    plan_at(n_ctx) -> Plan, whose bytes grow with n_ctx. limits: bytes for each limited device, see `excess`. Total
    bytes are nearly linear in n_ctx above the windows, so each guess is the line's through the two nearest plans.
    """
    plans = {}

    def over(n: int) -> int:
        plans[n] = plan_at(n * step)
        return excess(plans[n], limits)

    low, high = 1, max(1, high // step)
    over_low = over(low)
    if over_low > 0:
        return None
    over_high = over(high)
    if over_high <= 0:
        return high * step, plans[high]
    n_tries = 0
    while high - low > 1:
        n_tries += 1
        guess = low + int((high - low) * -over_low / (over_high - over_low)) if n_tries % 4 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        if (found := over(guess)) <= 0:
            low, over_low = guess, found
        else:
            high, over_high = guess, found
    return low * step, plans[low]


def excess(plan: Plan, limits: Sequence[int]) -> int:
    """Bytes by which the plan's fullest device is over its limit; 0 or less where it fits. One limit holds for every
    device. The host is limited only where it is all there is."""
    names = [name for name in plan.devices if name != "host"] or ["host"]
    if len(limits) not in (1, len(names)):
        raise HwkvError(
            f"--memory gives {len(limits)} sizes, the server would use {len(names)} devices: {', '.join(names)}"
        )
    limits = list(limits) * len(names) if len(limits) == 1 else limits
    return max(sum(plan.devices.get(name, {}).values()) - limit for name, limit in zip(names, limits))
