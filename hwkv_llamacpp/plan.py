"""`hwkv plan`: what a server would take, before it is started, and the largest context that fits a memory size.

KV bytes come from the runtime's own rule (footprint.py), so they are exact. With the native build here, llama.cpp's dry run gives
everything else on each device and confirms the KV bytes; without it, sliding windows, recurrent state and weights come from formulas over
the GGUF's header, and compute buffers are not known. Every answer says which numbers are formulas.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from . import dry_run, native
from .embed import read_policy
from .errors import HwkvError
from .footprint import CACHE_TYPES, CELL_PAD, Footprint, pad, predict, row_bytes
from .geometry import ARCHITECTURES, PARALLEL, ModelGeometry
from .gguf_file import GGUFFile, open_first_shard
from .policy import Policy
from .serve import ENVIRONMENT

MIB = 2**20
PARTS = ("weights", "KV", "own windows", "recurrent", "compute", "output", "process")
CHECKPOINTS, PROMPT_CACHE_BYTES = 32, 8192 * MIB  # llama-server's defaults for --ctx-checkpoints and --cache-ram
HOST = ("Host", "CPU", "CPU_REPACK")  # buffer types in the machine's own memory
SERVER_BYTES = 12 * MIB  # what llama-server itself holds at work: threads, request, sampler; 10 to 13 MiB on SmolLM2 and Gemma 3 270M
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of one server. devices: {device: {part: bytes}}, parts as in PARTS; a part that is not known is left out."""

    context: dry_run.Context
    footprint: Footprint
    devices: dict
    group_devices: tuple          # per group of the footprint: {device: bytes}
    formulas: tuple               # parts that are formulas
    unknown: tuple                # parts that are not in the total
    checkpoint_bytes: int | None  # of one context checkpoint, at most

    @property
    def kv_bytes(self):
        return self.footprint.kv_bytes

    @property
    def total_bytes(self):
        return sum(sum(parts.values()) for parts in self.devices.values())

    @property
    def gpu_bytes(self):
        """Of all devices but the host."""
        return sum(sum(parts.values()) for name, parts in self.devices.items() if name != "host")

    def parts(self):
        """{part: bytes} over all devices."""
        return {part: sum(parts[part] for parts in self.devices.values() if part in parts)
                for part in PARTS if any(part in parts for parts in self.devices.values())}

    def to_dict(self):
        return {"n_ctx": self.footprint.n_ctx, "n_parallel": self.context.n_parallel, "kv_bytes": self.kv_bytes,
                "full_kv_bytes": self.footprint.full_kv_bytes, "total_bytes": self.total_bytes, "parts": self.parts(),
                "devices": self.devices, "formulas": list(self.formulas), "unknown": list(self.unknown),
                "groups": [{**group, "devices": devices} for group, devices in zip(self.footprint.to_dict()["groups"], self.group_devices)],
                "checkpoint_bytes": self.checkpoint_bytes}


class Planner:
    """Plans for one model. Contexts share what does not depend on them."""

    def __init__(self, model, dry=None):
        """dry: use llama.cpp's dry run; by default where the build is there and the file lists tensors."""
        self.model = Path(model)
        self.geometry = ModelGeometry.from_gguf(model)
        self.header = Header(model)
        self._whole = self.header.with_room_for_data()
        self.dry = self.header.n_tensors > 0 and is_built() if dry is None else dry
        self._weights = {}   # by n_gpu_layers
        self._resident = {}  # by n_ubatch and policy: it differs a little from run to run, and a plan must grow with its context alone

    def plan(self, context, policy=None, process_bytes=None, on_gpu=False):
        """Plan of a dry_run.Context; policy: the Policy that context.policy names; process_bytes: what the process is known to hold beside
        its buffers, where it was measured, on the first GPU or on the host."""
        footprint = predict(self.geometry, policy, context.n_ctx, n_batch=context.n_batch, n_ubatch=context.n_ubatch,
                            n_seq_max=context.n_parallel, unified=context.kv_unified, type_k=context.type_k, type_v=context.type_v,
                            flash_attn=context.flash_attn != "off")
        sliding = sliding_bytes(self.geometry, context, footprint)
        if self.dry:
            return self._exact(context, footprint, sliding, process_bytes, on_gpu)
        parts = {"weights": self.header.weight_bytes, "KV": footprint.kv_bytes, "own windows": sliding,
                 "recurrent": self.header.recurrent_bytes(self.geometry, context.n_parallel)}
        known = {part: value for part, value in parts.items() if value}
        unknown = tuple(part for part in (*parts, "compute", "output", "process") if part not in parts or parts[part] is None)
        return Plan(context, footprint, {"all devices": known}, tuple({"all devices": group.bytes} for group in footprint.groups),
                    tuple(known), unknown, None)

    def _exact(self, context, footprint, sliding, process_bytes, on_gpu):
        if self._whole:
            context = replace(context, model=self._whole.name, policy=str(self.model) if context.policy == "embedded" else context.policy)
        found = dry_run.run(context)
        kv_bytes = footprint.kv_bytes
        if abs(sum(found["caches"]) - kv_bytes - (sliding or 0)) > 0.006 * MIB * len(found["caches"]):
            raise HwkvError(f"{self.model}: llama.cpp's dry run makes caches of {sum(found['caches']):,} bytes, the formula says "
                            f"{kv_bytes + (sliding or 0):,}: please report this")
        devices = {}

        def add(device, part, n_bytes):
            if n_bytes:
                parts = devices.setdefault("host" if device in HOST or device.endswith("_Host") else device, {})
                parts[part] = parts.get(part, 0) + n_bytes

        if context.n_gpu_layers not in self._weights:
            self._weights[context.n_gpu_layers] = dry_run.weights(context.model, context.n_gpu_layers)
        for device, n_bytes in self._weights[context.n_gpu_layers].items():
            add(device, "weights", n_bytes)
        at = {int(layer): device for layer, device in found["cache_devices"].items()}
        group_devices = []
        for group in footprint.groups:
            by_device = {}
            for layer, _, n_bytes in group.layers:
                add(at[layer], "KV", n_bytes)
                by_device[at[layer]] = by_device.get(at[layer], 0) + n_bytes
            group_devices.append(by_device)
        own = [layer.layer for layer in self.geometry.layers if layer.kind == "swa" and layer.layer in at]
        for layer in own:
            add(at[layer], "own windows", sliding // len(own))
        recurrent = {int(layer): device for layer, device in found["recurrent_devices"].items()}
        for device in recurrent.values():
            add(device, "recurrent", found["recurrent"] // len(recurrent))
        for part in ("compute", "output"):
            for device, n_bytes in found[part].items():
                add(device, part, n_bytes)
        resident = self._resident.setdefault((context.n_ubatch, context.policy), found["resident"])
        if process_bytes is None:
            add("host", "process", resident + SERVER_BYTES)
        else:
            add(next((name for name in devices if on_gpu and name != "host"), "host"), "process", process_bytes)
        checkpoint = found["hwkv"].get("checkpoint_bytes") or (found["recurrent"] + (sliding or 0)) // context.n_parallel or None
        return Plan(context, footprint, devices, tuple(group_devices), ("process",), (), checkpoint)



class Header:
    """What the GGUF's header tells about weights and recurrent state. Of a split model, all shards that are there."""

    def __init__(self, path):
        file, shards = open_first_shard(path)
        with file:
            self.architecture = file.get("general.architecture")
            self._keys = {name: file.get(f"{self.architecture}.{name}") for name in (
                "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count", "shortconv.l_cache", "embedding_length")}
            tensors = list(file.tensors)
            self._path, self._data_start = file.path, file.data_start
            self._lacks_data = bool(tensors) and not file.has_data and len(shards) == 1
        for shard in shards[1:] if len(shards) > 1 else ():
            with GGUFFile(shard) as file:
                tensors += file.tensors
        self._data_bytes = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
        self.n_tensors = len(tensors)
        self.weight_bytes = sum(tensor.n_bytes for tensor in tensors) if tensors else None

    def with_room_for_data(self):
        """Of a file that ends with its header, a temporary copy as long as the whole model would be, without taking disk: llama.cpp checks
        the length, and its dry run reads no data. None for a whole file."""
        if not self._lacks_data:
            return None
        copy = tempfile.NamedTemporaryFile(suffix=".gguf")
        copy.write(self._path.read_bytes())
        copy.truncate(self._data_start + self._data_bytes)
        copy.flush()
        return copy

    def recurrent_bytes(self, geometry, n_parallel):
        """F32 states of all recurrent layers, as llama_hparams::n_embd_r and n_embd_s count them; None for kinds of layer that this
        formula does not know."""
        parallel = ARCHITECTURES[self.architecture].recurrent == PARALLEL
        n_layers = sum(layer.kind == "recurrent" or parallel for layer in geometry.layers)
        keys = self._keys
        if n_layers == 0:
            return 0
        if keys["shortconv.l_cache"]:
            values = keys["embedding_length"] * (keys["shortconv.l_cache"] - 1)
        elif keys["ssm.inner_size"]:
            conv, inner, state = keys["ssm.conv_kernel"], keys["ssm.inner_size"], keys["ssm.state_size"]
            values = (conv - 1) * (inner + 2 * (keys["ssm.group_count"] or 0) * state) + state * inner
        else:
            return None
        return n_layers * values * 4 * n_parallel


def sliding_bytes(geometry, context, footprint):
    """KV bytes of the model's own sliding-window layers, as llama_kv_cache_iswa sizes them."""
    sharing, streams = (context.n_parallel, 1) if context.kv_unified else (1, context.n_parallel)
    cells = pad(min(footprint.n_ctx_seq, geometry.n_swa * sharing + footprint.n_ubatch))
    return sum(cells * streams * (row_bytes(context.type_k, x.n_head_kv * x.head_dim_k) + row_bytes(context.type_v, x.n_head_kv * x.head_dim_v))
               for x in geometry.layers if x.kind == "swa")


def is_built():
    try:
        native.binary("llama-fit-params")
    except HwkvError:
        return False
    return True


def largest_context(plan_at, limits, step, high):
    """(largest n_ctx that fits, its Plan), a multiple of step up to high; None where not even one step fits.

    plan_at(n_ctx) -> Plan, whose bytes grow with n_ctx. limits: bytes for each limited device, see `excess`. Total bytes are nearly
    linear in n_ctx above the windows, so each guess is the line's through the two nearest plans.
    """
    plans = {}

    def over(n):
        plans[n] = plan_at(n * step)
        return excess(plans[n], limits)

    low, high = 1, high // step
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


def excess(plan, limits):
    """Bytes by which the plan's fullest device is over its limit; 0 or less where it fits. One limit holds for every device. The host is
    limited only where it is all there is."""
    names = [name for name in plan.devices if name != "host"] or ["host"]
    if len(limits) not in (1, len(names)):
        raise HwkvError(f"--memory gives {len(limits)} sizes, the server would use {len(names)} devices: {', '.join(names)}")
    limits = limits * len(names) if len(limits) == 1 else limits
    return max(sum(plan.devices.get(name, {}).values()) - limit for name, limit in zip(names, limits))


def parse_bytes(text):
    """Bytes of "24GiB", "512M", "3.5 GB" (units are powers of 1024) or of a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a memory size such as 24GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


# the command

def add_arguments(parser):
    parser.description = ("Predicts what a server would take: KV by window and device, weights, states, compute buffers. With --memory, also "
                          "the largest context that fits, for 1 to -np slots.")
    parser.epilog = "example:\n  hwkv plan model.gguf --policy policy.json -c 32768\n  hwkv plan model.gguf --policy policy.json -ngl 99 --memory 24GiB -np 4"
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file; its header is enough")
    parser.add_argument("--policy", metavar="P", help='policy JSON, a GGUF with an embedded policy, "embedded" or "off" (default: '
                                                      f"${ENVIRONMENT}, else the policy in MODEL, if it has one)")
    parser.add_argument("--memory", type=lambda text: [parse_bytes(part) for part in text.split(",")], metavar="SIZE[,SIZE...]",
                        help="memory of each device, or of the process where there is no GPU, such as 24GiB")
    parser.add_argument("-md", "--model-draft", type=Path, metavar="DRAFT", help="draft model: its server memory is added, with full KV")
    add_context_arguments(parser)
    parser.add_argument("-np", "--parallel", type=_count, default=1, metavar="N", help="slots (default: 1)")
    parser.add_argument("--kv-unified", action="store_true", help="one buffer for all slots")
    parser.add_argument("--formulas", action="store_true", help="no dry run, even where the native build is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_context_arguments(parser, n_ctx=True):
    if n_ctx:
        parser.add_argument("-c", "--ctx-size", type=_count, default=0, metavar="N", help="context (default: the trained one)")
    parser.add_argument("-b", "--batch-size", type=_count, default=2048, metavar="N", help="logical batch (default: 2048)")
    parser.add_argument("-ub", "--ubatch-size", type=_count, default=512, metavar="N", help="physical batch (default: 512)")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=None, metavar="N", help="layers on the GPU (default: llama.cpp's)")
    parser.add_argument("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16", help="type of K (default: f16)")
    parser.add_argument("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16", help="type of V (default: f16)")
    parser.add_argument("-fa", "--flash-attn", choices=("on", "off"), default="on", help="FlashAttention (default: on)")


def run(args):
    from rich.console import Console

    planner = Planner(args.model, False if args.formulas else None)
    geometry = planner.geometry
    choice = args.policy or os.environ.get(ENVIRONMENT) or "embedded"
    policy = None if choice == "off" else read_policy(args.model) if choice == "embedded" else Policy.load(choice)
    if policy:
        policy.check(geometry, args.model if choice == "embedded" else choice)
    context = dry_run.Context(str(args.model), "off", args.ctx_size or geometry.n_ctx_train, args.batch_size, args.ubatch_size, args.parallel,
                              args.kv_unified, args.gpu_layers, args.flash_attn, args.cache_type_k, args.cache_type_v)
    if not planner.dry and not args.formulas:
        why = "the file has no tensors" if planner.header.n_tensors == 0 else f"the native build is missing: {native.BUILD_COMMAND}"
        print(f"no dry run ({why}); every number is a formula", file=sys.stderr)
    if context.n_ctx > geometry.n_ctx_train * args.parallel:
        print(f"warning: the context of {context.n_ctx} tokens is larger than the model was trained for ({geometry.n_ctx_train}): "
              "llama-server would cap its slots", file=sys.stderr)
    draft = Planner(args.model_draft, planner.dry) if args.model_draft else None

    def plan_at(n_ctx, policy, n_parallel):
        here = replace(context, n_ctx=n_ctx, n_parallel=n_parallel, policy=str(choice) if policy else "off")
        plan = planner.plan(here, policy)
        return with_draft(plan, draft.plan(replace(here, model=str(draft.model), policy="off"))) if draft else plan

    arms = {"full KV": None, **({"policy": policy} if policy else {})}
    plans = {name: plan_at(context.n_ctx, arm, args.parallel) for name, arm in arms.items()}
    largest = {}
    if args.memory:
        for n_parallel in range(1, args.parallel + 1):
            step = CELL_PAD * (1 if args.kv_unified else n_parallel)
            for name, arm in arms.items():
                largest[n_parallel, name] = largest_context(lambda n: plan_at(n, arm, n_parallel), args.memory, step, geometry.n_ctx_train * n_parallel)
    if args.json:
        print(json.dumps({"model": geometry.name, "n_ctx_train": geometry.n_ctx_train, "plans": {name: plan.to_dict() for name, plan in plans.items()},
                          "memory_bytes": args.memory, "largest": [{"n_parallel": n, "plan": name, "n_ctx": found and found[0],
                                                                    "total_bytes": found and found[1].total_bytes}
                                                                   for (n, name), found in largest.items()]}, indent=2))
        return
    console = Console(highlight=False, **({} if sys.stdout.isatty() else {"width": 200}))
    show(console, geometry, plans)
    if args.memory:
        show_largest(console, geometry, largest, args.memory, plans)


def with_draft(plan, draft):
    """The plan of a server that holds a draft model, too; the draft's program is the same process."""
    devices = {name: dict(parts) for name, parts in plan.devices.items()}
    for name, parts in draft.devices.items():
        own = sum(n_bytes for part, n_bytes in parts.items() if part != "process")
        devices.setdefault(name, {})["draft model"] = own
    return replace(plan, devices=devices)


def show(console, geometry, plans):
    from rich import box
    from rich.table import Table

    first = next(iter(plans.values()))
    table = Table(title=f"{geometry.name}, -c {first.footprint.n_ctx}, {first.context.n_parallel} slots, MiB", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("device", "", *plans):
        table.add_column(heading, justify="left" if heading in ("device", "") else "right")
    devices = list(dict.fromkeys(device for plan in plans.values() for device in plan.devices))
    for device in devices:
        rows = {}  # (place among PARTS, line) -> cell of each plan
        for i, plan in enumerate(plans.values()):
            for part, n_bytes in plan.devices.get(device, {}).items():
                place = PARTS.index(part) if part in PARTS else len(PARTS)
                if part == "KV":
                    for group, at in zip(plan.footprint.groups, plan.group_devices):
                        window = "full" if group.window is None else group.window
                        held = sum(n for name, n in at.items() if _same_device(name, device))
                        rows.setdefault((place, f"KV, window {window}, {group.heads} KV heads, {group.cells:,} cells"), {})[i] = held
                else:
                    rows.setdefault((place, part + (" (formula)" if part in plan.formulas else "")), {})[i] = n_bytes
        for (_, line), cells in sorted(rows.items(), key=lambda row: row[0][0]):
            table.add_row(device, line, *[f"{cells[i] / MIB:,.2f}" if i in cells else "" for i in range(len(plans))])
    table.add_section()
    table.add_row("total", "", *[f"{plan.total_bytes / MIB:,.2f}" for plan in plans.values()])
    table.add_row("KV of the layers that take windows", "", *[f"{plan.kv_bytes / MIB:,.2f}" for plan in plans.values()])
    console.print(table)
    if first.unknown:
        console.print(f"not in the total, because only a dry run can tell: {', '.join(first.unknown)}")
    if any(plan.checkpoint_bytes for plan in plans.values()):
        each = ", ".join(f"{(plan.checkpoint_bytes or 0) / MIB:,.2f} MiB ({name})" for name, plan in plans.items())
        console.print(f"beside the total, on the host: up to {CHECKPOINTS} context checkpoints per slot of {each} each, unless --ctx-checkpoints says less",
                      soft_wrap=True)
    console.print(f"and up to {PROMPT_CACHE_BYTES / MIB:,.0f} MiB of prompt cache, unless --cache-ram says less", soft_wrap=True)


def show_largest(console, geometry, largest, limits, plans):
    from rich import box
    from rich.table import Table

    table = Table(title=f"largest context in {', '.join(f'{limit / 2**30:.4g} GiB' for limit in limits)}", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("slots", *plans, *(["gain"] if len(plans) > 1 else [])):
        table.add_column(heading, justify="right")
    at_most = False
    for n_parallel in dict.fromkeys(n for n, _ in largest):
        found = [largest[n_parallel, name] for name in plans]
        trained = geometry.n_ctx_train * n_parallel
        at_most |= any(x and x[0] >= trained for x in found)
        cells = [f"{x[0]:,}" + (" *" if x[0] >= trained else "") if x else "none" for x in found]
        table.add_row(str(n_parallel), *cells, *([f"{found[1][0] / found[0][0]:.3f}"] if len(found) > 1 and all(found) else [""] * (len(found) > 1)))
    console.print(table)
    if at_most:
        console.print("* all that the model was trained for; the memory would hold more")


def _same_device(name, device):
    return name == device or device == "host" and name in HOST


def _count(text):
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1 to {2**31 - 1}")
    return int(text)
