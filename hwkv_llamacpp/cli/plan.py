"""`hwkv plan`: what a server would take, by window and device, and the largest context that a memory size holds."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import sizes
from ..base.names import clip, escaped, message
from ..base.options import count
from ..gguf.embed import chosen_policy
from ..gguf.geometry import ModelGeometry
from ..plan import dry_run, memory
from ..plan.planner import HOST, MIB, PARTS, Plan, Planner, largest_context
from ..policy.footprint import CELL_PAD
from ..policy.policy import Policy
from ..runtime import native
from .arguments import add_context_arguments, policy_argument, policy_choice

if TYPE_CHECKING:
    from rich.console import Console

HEAP_BYTES = 32 * MIB  # what is larger, glibc always maps by itself and gives back whole
CHECKPOINTS, PROMPT_CACHE_BYTES = 32, 8192 * MIB  # llama-server's defaults for --ctx-checkpoints and --cache-ram


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts what a server would take: KV by window and device, weights, states, compute buffers.\n"
        "With --memory, also the largest context that fits, for 1 to -np slots."
    )
    parser.epilog = (
        "example:\n  hwkv plan model.gguf --policy policy.json -c 32768\n"
        "  hwkv plan model.gguf --policy policy.json -ngl 99 --memory 24GiB -np 4"
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file; its header is enough")
    policy_argument(parser)
    parser.add_argument(
        "--memory",
        type=lambda text: [sizes.parse(part) for part in text.split(",")],
        metavar="SIZE[,SIZE...]",
        help="memory of each device, or of the process where there is no GPU, such as 24GiB",
    )
    parser.add_argument(
        "-md", "--model-draft", type=Path, metavar="DRAFT", help="draft model: its server memory is added, with full KV"
    )
    parser.add_argument(
        "-c", "--ctx-size", type=count, default=0, metavar="N", help="context (default: the trained one)"
    )
    add_context_arguments(parser)
    parser.add_argument("-fa", "--flash-attn", choices=("on", "off"), default="on", help="FlashAttention (default: on)")
    parser.add_argument("-np", "--parallel", type=count, default=1, metavar="N", help="slots (default: 1)")
    parser.add_argument("--kv-unified", action="store_true", help="one buffer for all slots")
    parser.add_argument("--formulas", action="store_true", help="no dry run, even where the native build is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    planner = Planner(args.model, False if args.formulas else None)
    geometry = planner.geometry
    choice = policy_choice(args.policy)
    policy = chosen_policy(args.model, choice)
    context = dry_run.Context(
        str(args.model),
        "off",
        args.ctx_size or geometry.n_ctx_train,
        args.batch_size,
        args.ubatch_size,
        args.parallel,
        args.kv_unified,
        args.gpu_layers,
        args.flash_attn,
        args.cache_type_k,
        args.cache_type_v,
    )
    n_ctx = max(context.n_ctx, geometry.n_ctx_train * args.parallel if args.memory else 0)
    if planner.dry and n_ctx > dry_run.MAX_CTX:
        planner.dry = False
        why = f"a context of {n_ctx:,} tokens, at most {dry_run.MAX_CTX:,} expected"
    elif planner.header.n_tensors == 0:
        why = "the file has no tensors"
    else:
        why = f"the native build is missing: {native.BUILD_COMMAND}"
    if not planner.dry and not args.formulas:
        print(f"no dry run ({why}); every number is a formula", file=sys.stderr)
    if args.gpu_layers and planner.dry and not native.has_gpu():
        print(
            f"warning: -ngl {args.gpu_layers}: the build in use ({native.build_dir().name}) has no GPU, so all of it is"
            " planned for the host, and --memory is the host's; ./build.sh --cuda or --vulkan makes one that has",
            file=sys.stderr,
        )
    geometry.warn_beyond(context.n_ctx, args.parallel)
    draft = Planner(args.model_draft, planner.dry) if args.model_draft else None

    def plan_at(n_ctx: int, policy: Policy | None, n_parallel: int) -> Plan:
        here = replace(context, n_ctx=n_ctx, n_parallel=n_parallel, policy=choice or "embedded" if policy else "off")
        plan = planner.plan(here, policy)
        return plan.with_draft(draft.plan(replace(here, model=str(draft.model), policy="off"))) if draft else plan

    arms = {"full KV": None, **({"policy": policy} if policy else {})}
    plans = {name: plan_at(context.n_ctx, arm, args.parallel) for name, arm in arms.items()}
    smallest = min(plans.values(), key=lambda plan: plan.kv_bytes)
    if not args.memory and (too_large := memory.beyond(f"-c {context.n_ctx}", smallest.footprint)):
        print(f"warning: {message(too_large)}", file=sys.stderr)
    largest = {}
    if args.memory:
        for n_parallel in range(1, args.parallel + 1):
            step = CELL_PAD * (1 if args.kv_unified else n_parallel)
            for name, arm in arms.items():
                largest[n_parallel, name] = largest_context(
                    partial(plan_at, policy=arm, n_parallel=n_parallel),
                    args.memory,
                    step,
                    geometry.n_ctx_train * n_parallel,
                )
    if args.json:
        found = [
            {"n_parallel": n, "plan": name, "n_ctx": found and found[0], "total_bytes": found and found[1].total_bytes}
            for (n, name), found in largest.items()
        ]
        print(
            json.dumps(
                {
                    "model": geometry.name,
                    "n_ctx_train": geometry.n_ctx_train,
                    "memory_bytes": args.memory,
                    "largest": found,
                    "plans": {name: plan.to_dict() for name, plan in plans.items()},
                },
                indent=2,
            )
        )
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    show(console, geometry, plans)
    if args.memory:
        show_largest(console, geometry, largest, args.memory, plans)


def show(console: "Console", geometry: ModelGeometry, plans: Mapping[str, Plan]) -> None:
    """The table of bytes, and what is not in it."""
    first = next(iter(plans.values()))
    n_slots = first.context.n_parallel
    slots = (
        "1 slot"
        if n_slots == 1
        else (
            f"{n_slots} slots that share them"
            if first.context.kv_unified
            else f"{n_slots} slots of {first.footprint.n_ctx_seq}"
        )
    )
    table = _table(f"{escaped(clip(geometry.name))}, -c {first.footprint.n_ctx}, {slots}, MiB")
    for heading in ("device", "", *plans):
        table.add_column(heading, justify="left" if heading in ("device", "") else "right")
    devices = list(dict.fromkeys(device for plan in plans.values() for device in plan.devices))
    for device in devices:
        rows: dict[tuple[int, str], dict[int, int]] = {}  # (place among PARTS, line) -> cell of each plan
        for i, plan in enumerate(plans.values()):
            for part, n_bytes in plan.devices.get(device, {}).items():
                place = PARTS.index(part) if part in PARTS else len(PARTS)
                if part == "KV":
                    for group, at in zip(plan.footprint.groups, plan.group_devices):
                        window = "full" if group.window is None else group.window
                        cells = f"{group.cells:,} cells" + (f" x {group.streams} slots" if group.streams > 1 else "")
                        held = sum(n for name, n in at.items() if _same_device(name, device))
                        rows.setdefault((place, f"KV, window {window}, {group.heads} KV heads, {cells}"), {})[i] = held
                else:
                    rows.setdefault((place, part + (" (formula)" if part in plan.formulas else "")), {})[i] = n_bytes
        for (_, line), sizes_of in sorted(rows.items(), key=lambda row: row[0][0]):
            shown = [f"{sizes_of[i] / MIB:,.2f}" if i in sizes_of else "" for i in range(len(plans))]
            table.add_row(device, line, *shown)
    table.add_section()
    table.add_row(
        "total" + ("" if n_slots == 1 else ", all slots"),
        "",
        *[f"{plan.total_bytes / MIB:,.2f}" for plan in plans.values()],
    )
    table.add_row("KV of the layers that take windows", "", *[f"{plan.kv_bytes / MIB:,.2f}" for plan in plans.values()])
    console.print(table)
    if first.unknown:
        console.print(f"not in the total, because only a dry run can tell: {', '.join(first.unknown)}")
    console.print("not in the total, because they fill as requests come, on the host:")
    if any(plan.checkpoint_bytes for plan in plans.values()):
        each = ", ".join(
            f"{plan.checkpoint_bytes / MIB:,.2f} MiB ({name})" for name, plan in plans.items() if plan.checkpoint_bytes
        )
        console.print(
            f"  context checkpoints, up to {CHECKPOINTS} per slot (--ctx-checkpoints); each takes {each}",
            soft_wrap=True,
        )
    console.print(
        f"  the cache of earlier prompts, up to {PROMPT_CACHE_BYTES / MIB:,.0f} MiB (--cache-ram),"
        " and for a moment one prompt more",
        soft_wrap=True,
    )
    if any(plan.checkpoint_bytes and plan.checkpoint_bytes < HEAP_BYTES for plan in plans.values()):
        console.print(
            "  a third more of both: so small, they lie in the C library's heap and leave gaps there", soft_wrap=True
        )


def show_largest(
    console: "Console",
    geometry: ModelGeometry,
    largest: Mapping[tuple[int, str], tuple[int, Plan] | None],
    limits: Sequence[int],
    plans: Mapping[str, Plan],
) -> None:
    """The table of largest contexts: a row for each number of slots."""
    unknown = next(iter(plans.values())).unknown
    table = _table(f"largest context in {', '.join(map(sizes.show, limits))}{', at most' if unknown else ''}")
    for heading in ("slots (-np)", *plans, *(["gain"] if len(plans) > 1 else [])):
        table.add_column(heading, justify="right")
    at_most = False
    for n_parallel in dict.fromkeys(n for n, _ in largest):
        found = [largest[n_parallel, name] for name in plans]
        trained = geometry.n_ctx_train * n_parallel
        at_most |= any(x and x[0] >= trained for x in found)
        cells = [f"{x[0]:,}" + (" *" if x[0] >= trained else "") if x else "none" for x in found]
        if len(found) > 1:
            full, policy = found
            cells.append(f"{policy[0] / full[0]:.3f}" if full and policy else "")
        table.add_row(str(n_parallel), *cells)
    console.print(table)
    if unknown:
        console.print(f"at most: {', '.join(unknown)} take memory, too", soft_wrap=True)
    if at_most:
        console.print("* all that the model was trained for; the memory would hold more")
    if any(n > 1 for n, _ in largest):
        console.print("contexts of several slots are those of -c, for all slots together")


def _table(title):
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title), box=box.SIMPLE_HEAD, pad_edge=False)


def _same_device(name: str, device: str) -> bool:
    return name == device or device == "host" and name in HOST
