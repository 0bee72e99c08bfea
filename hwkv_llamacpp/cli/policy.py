"""`hwkv policy make|show|check|schema`: policies by hand and baselines; as a table; does it fit; the file format."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..base import options
from ..base.formats import schema
from ..base.names import clip, escaped
from ..base.shape import WindowRow
from ..baselines.baseline import baselines
from ..gguf.geometry import ModelGeometry
from ..policy.footprint import predict
from ..policy.policy import Policy, PolicyFile
from . import output
from .arguments import HelpFormatter, check_order, force_flag, json_flag, output_flag

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A policy is a small JSON file: one row of windows for each layer it lists, one window per KV head, in "
        "tokens or"
        ' "full". Layers that it does not list are full.'
    )
    parser.epilog = (
        "example:\n  hwkv policy make uniform model.gguf --window 1024 -o policy.json\n"
        "  hwkv policy check model.gguf policy.json\n"
        "  hwkv policy show policy.json --plot policy.png"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    make = commands.add_parser("make", help="make a policy by hand", formatter_class=HelpFormatter)
    make.description = "Hand-made policies and baselines, to start with or to compare with."
    make.epilog = "example:\n  hwkv policy make uniform model.gguf --window 1024 -o policy.json"
    kinds = make.add_subparsers(title="kinds", metavar="KIND", required=True)
    for name, baseline in baselines().items():
        kind = kinds.add_parser(name, help=baseline.help, formatter_class=HelpFormatter)
        kind.description = f"{baseline.help[:1].upper()}{baseline.help[1:]}. {baseline.details}"
        kind.epilog = f"example:\n  {baseline.example}" if baseline.example else None
        kind.add_argument("model", type=Path, metavar="MODEL", help="GGUF file of the model that the policy is for")
        output_flag(kind)
        baseline.add_arguments(kind)
        kind.set_defaults(run=run_make, baseline=baseline)

    show = commands.add_parser("show", help="a policy as a table, and as a picture", formatter_class=HelpFormatter)
    show.description = (
        "A policy as a table, and as a picture. With --model the layers that it leaves full are shown, too."
    )
    show.epilog = "example:\n  hwkv policy show policy.json --plot policy.png"
    show.set_defaults(run=run_show)
    show.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    show.add_argument("-m", "--model", type=Path, metavar="MODEL", help="GGUF file of its model")
    show.add_argument("--plot", type=Path, metavar="FILE", help="write a heatmap as .png, .svg or .pdf")
    force_flag(show)
    json_flag(show)

    text = "does a policy fit a model, and what does it save"
    check = commands.add_parser("check", help=text, formatter_class=HelpFormatter)
    check.description = (
        "Does a policy fit a model, and what does it save. Exit code 0 if it fits, 1 with the reason if not."
    )
    check.epilog = "example:\n  hwkv policy check model.gguf policy.json -c 32768"
    check.set_defaults(run=run_check)
    check.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    check.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    check.add_argument(
        "-c",
        "--ctx-size",
        type=options.tokens,
        default=0,
        metavar="N",
        help="context to predict KV bytes for, with F16 K and V and one sequence (default: the trained one)",
    )
    json_flag(check)

    text = "the JSON schema of policy files"
    form = commands.add_parser("schema", help=text, formatter_class=HelpFormatter)
    form.description = f"Prints {text}, for editors and validators. No layer may be listed twice: that it cannot say."
    form.epilog = "example:\n  hwkv policy schema > hwkv-policy.schema.json"
    form.set_defaults(run=run_schema)


def run_schema(args: argparse.Namespace) -> None:
    print(json.dumps(schema(PolicyFile), indent=2))


def run_make(args: argparse.Namespace) -> None:
    geometry = ModelGeometry.from_gguf(args.model)
    policy = args.baseline.make(geometry, args)
    output.write_policy(args, policy)
    if args.output is not None:
        n = geometry.n_ctx_train
        print(f"it keeps {policy.retention(n, geometry):.1%} of the KV cells at {n:,} tokens, the trained context")


def run_show(args: argparse.Namespace) -> None:
    policy = Policy.load(args.policy)
    geometry = None
    if args.model:
        geometry = ModelGeometry.from_gguf(args.model)
        policy.check(geometry, args.policy)
    if args.plot:
        from ..plot.heatmap import plot

        name = (policy.model or {}).get("name")
        plot(policy, args.plot, geometry, overwrite=args.force, title=escaped(clip(name)) if name else None)

    rows = {x.layer: policy.row(x) for x in geometry.configurable} if geometry else policy.layers
    n_ctx_train = geometry.n_ctx_train if geometry else 2**17
    lengths = [t for t in (2048, 8192, 32768, 131072) if t < n_ctx_train] + [n_ctx_train]
    retention = {t: policy.retention(t, geometry) for t in lengths}
    if args.json:
        return output.print_json(
            {
                "model": policy.model,
                "n_sink": policy.n_sink,
                "layers": [
                    {"layer": il, "windows": ["full" if w is None else w for w in row]} for il, row in rows.items()
                ],
                "retention": {str(t): r for t, r in retention.items()},
                "provenance": policy.provenance,
            }
        )

    model = policy.model or {}
    output.print_facts(
        [
            ("policy", str(args.policy)),
            *([("model", " ".join(str(model[k]) for k in ("architecture", "name") if k in model))] if model else []),
            ("sinks", str(policy.n_sink)),
            (
                "retention" if geometry else "retention, listed layers",
                ", ".join(f"{r:.3f} at {t:,}" for t, r in retention.items()),
            ),
            *_made_by(policy.provenance or {}),
            *([("picture", str(args.plot))] if args.plot else []),
        ]
    )
    if rows:
        first, n_more, last = output.ends(list(rows))
        width = max(len(output.window(w)) for il in (*first, *last) for w in rows[il])
        table = output.table("layer", "windows, by KV head")
        for il in first:
            table.add_row(str(il), _windows(rows[il], width))
        if n_more:
            table.add_row("...", f"and {n_more:,} more layers; --json gives all")
        for il in last:
            table.add_row(str(il), _windows(rows[il], width))
        output.console().print(table)


def _windows(row: WindowRow, width: int) -> str:
    first, n_more, last = output.ends(row)
    words = [f"{output.window(w):>{width}}" for w in first]
    if n_more:
        words.append(f"... and {n_more:,} more ...")
    return "  ".join(words + [f"{output.window(w):>{width}}" for w in last])


def run_check(args: argparse.Namespace) -> None:
    check_order(args)
    geometry = ModelGeometry.from_gguf(args.model)
    policy = Policy.load(args.policy)
    policy.check(geometry, args.policy)
    geometry.warn_beyond(args.ctx_size)
    footprint = predict(geometry, policy, args.ctx_size)
    retention = policy.retention(args.ctx_size or geometry.n_ctx_train, geometry)
    if args.json:
        return output.print_json(
            {
                "fits": True,
                "fingerprint": policy.fingerprint(geometry.n_layer),
                "n_ctx": footprint.n_ctx,
                "retention": retention,
                **footprint.to_dict(),
            }
        )
    output.print_facts(
        [
            ("fits", policy.summary(geometry)),
            ("retention", f"{retention:.3f} at {args.ctx_size or geometry.n_ctx_train:,} tokens"),
            (
                "predicted KV",
                f"{footprint.kv_bytes / MIB:,.1f} MiB of {footprint.full_kv_bytes / MIB:,.1f} MiB"
                f" (-c {footprint.n_ctx} -ub {footprint.n_ubatch}, F16, one sequence)",
            ),
        ]
    )
    if footprint.groups:
        table = output.table("window", "layers", "KV heads", "cells", "MiB")
        for group in footprint.groups:
            table.add_row(
                output.window(group.window),
                str(len(group.layers)),
                str(group.heads),
                f"{group.cells:,}",
                f"{group.bytes / MIB:,.1f}",
            )
        output.console().print(table)


def _made_by(provenance: dict[str, Any] | None) -> list[tuple[str, str]]:
    """[("made by", line)] of what matters most in a provenance, which may be any JSON object; all of it is in
    --json."""
    if not provenance:
        return []
    budget = provenance.get("budget")
    if not isinstance(budget, dict):
        budget = provenance
    words = [str(provenance.get("method", "unknown"))]
    words += [f"{key} {provenance[key]}" for key in ("tau", "window", "pattern", "seed") if key in provenance]
    for key, unit in (("retention", "share of the cells"), ("budget_bytes", "bytes")):
        if key in budget:
            words.append(f"a budget of {budget[key]} ({unit} at {budget.get('n_ctx', 'all')} tokens)")
    lines = [", ".join(words)]
    if "windows" in provenance:
        windows = provenance["windows"]
        lines.append(f"from windows of {', '.join(map(str, windows)) if isinstance(windows, list) else windows} tokens")
    if isinstance(trace := provenance.get("trace"), dict):
        held = trace.get("text")
        if held == "default":
            text = "the text that ships"
        else:
            text = ", ".join(map(str, held)) if isinstance(held, list) else str(held)
        lines.append(f"on traces of {provenance.get('n_ctx')} tokens of {text}")
    return [("" if i else "made by", line) for i, line in enumerate(lines)]
