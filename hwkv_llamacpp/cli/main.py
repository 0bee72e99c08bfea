"""The hwkv command: parse, call, print."""

import argparse
import importlib
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..base import options, sizes
from ..base.names import as_text
from ..errors import HwkvError

MIB = 2**20


def main(argv=None):
    """Runs one command. Returns its exit code: 0, 1 failed, 130 interrupted. SystemExit(2) is bad usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that half-written files are removed
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name may be no text
    try:
        args = build_parser(argv).parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except HwkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt}" if interrupt.args else "\ninterrupted; no file was left half written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hwkv info MODEL | head`
        _close_stdout()
        return 1
    except OSError as error:
        if error.filename is None:  # of stdout
            _close_stdout()
        what = "cannot print" if error.filename is None else as_text(os.fsdecode(error.filename))
        print(f"error: {what}: {error.strerror}", file=sys.stderr)
        return 1


def build_parser(argv=()):
    """The parser."""
    parser = argparse.ArgumentParser(
        prog="hwkv",
        description="Per-KV-head windows for llama.cpp's KV cache. A policy gives each KV head of a model a"
        " window of recent tokens, or all of them; the server keeps only what the windows can see.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The usual order:\n"
        "  hwkv info model.gguf                        what can be configured\n"
        "  hwkv calibrate model.gguf -o policy.json\n"
        "  hwkv embed model.gguf policy.json -o model-hwkv.gguf\n"
        "  hwkv serve model-hwkv.gguf -- -c 32768",
    )
    parser.add_argument("--version", action="version", version=f"hwkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _add(
        commands,
        "info",
        run_info,
        "geometry of a model: which layers take windows, and what their KV costs",
        "Reads only the header of the file, so it is as quick for 400 GB as for 1. Any shard of a split model will do.",
        "hwkv info model.gguf\n  hwkv info model.gguf --json | jq .kv_bytes_per_token",
    )
    command.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    _json_flag(command)

    policy = commands.add_parser(
        "policy",
        help="make, show and check policies",
        formatter_class=_HelpFormatter,
        description="A policy is a small JSON file: one row of windows for each layer it lists, one window"
        ' per KV head, in tokens or "full". Layers that it does not list are full.',
        epilog="example:\n  hwkv policy make uniform model.gguf --window 1024 -o policy.json\n"
        "  hwkv policy check model.gguf policy.json\n"
        "  hwkv policy show policy.json --plot policy.png",
    )
    policies = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_policy_commands(policies)

    command = _add(
        commands,
        "embed",
        run_embed,
        "write a copy of a model that carries a policy",
        "The copy has the policy in its metadata; every other key and all tensor data are copied unchanged, and any"
        " llama.cpp can load it. A policy that the model carries already is replaced. Of a split model the first"
        " shard gets the policy, and -o gives the prefix of all names.",
        "hwkv embed model.gguf policy.json -o model-hwkv.gguf",
    )
    command.add_argument("model", type=Path, metavar="MODEL", help="GGUF file, or any shard of a split one")
    command.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.gguf", help="file to write")
    command.add_argument(
        "--link", action="store_true", help="hard-link the further shards of a split model where possible"
    )
    _force_flag(command)
    _json_flag(command)

    command = _add(
        commands,
        "extract",
        run_extract,
        "print or save the policy that a model carries",
        "Gives back the policy that was embedded, as the canonical JSON that every hwkv command writes.",
        "hwkv extract model-hwkv.gguf -o policy.json",
    )
    command.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    _output_flag(command)

    # these bring their own options, so their modules are imported only for them
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, module, text in (
        ("calibrate", "calibration.calibrate", "find a policy for a model"),
        ("serve", "cli.serve", "run llama-server on a model, with a policy"),
        ("plan", "cli.plan", "predict what a server would take, and the largest context that fits"),
        ("bench", "cli.bench", "measure memory, speed and capacity of fresh servers"),
        ("report", "report.page", "tables and figures from measurements"),
        ("demo", "cli.demo", "see the saving on a small real model, end to end"),
    ):
        command = commands.add_parser(name, help=text, formatter_class=_HelpFormatter)
        if name == wanted:
            module = importlib.import_module(f"hwkv_llamacpp.{module}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _add_policy_commands(policies):
    make = policies.add_parser(
        "make",
        help="make a policy by hand",
        formatter_class=_HelpFormatter,
        description="Hand-made policies and baselines, to start with or to compare with.",
        epilog="example:\n  hwkv policy make uniform model.gguf --window 1024 -o policy.json",
    )
    kinds = make.add_subparsers(title="kinds", metavar="KIND", required=True)

    def kind(name, run, text, details, example):
        command = _add(kinds, name, run, text, details, example)
        command.add_argument("model", type=Path, metavar="MODEL", help="GGUF file of the model that the policy is for")
        _output_flag(command)
        return command

    command = kind(
        "uniform",
        run_make_uniform,
        "the same window for every KV head",
        "A window counts the token itself.",
        "hwkv policy make uniform model.gguf --window 512 --keep-full 0,1,17:2 -o policy.json\n"
        "  hwkv policy make uniform model.gguf --retention 0.5 -c 8192 -o policy.json",
    )
    _window_flags(command)
    _sink_flag(command, 0)
    command.add_argument(
        "--keep-full",
        type=_heads,
        default=[],
        metavar="L[:H],...",
        help="KV heads (layer:head) or whole layers that stay full",
    )

    command = kind(
        "streaming",
        run_make_streaming,
        "StreamingLLM: the first tokens and a window for every KV head",
        "The method of Xiao et al. 2023 (arXiv 2309.17453).",
        "hwkv policy make streaming model.gguf --window 1024 --sink 4 -o policy.json",
    )
    _window_flags(command)
    _sink_flag(command, 4)

    command = kind(
        "duo",
        run_make_duo,
        "DuoAttention's form: every KV head is full or streaming",
        "The form of Xiao et al. 2024 (arXiv 2410.10819). Full are the heads that lose most with the window, as a run of"
        " hwkv calibrate --method leastkl measured it.",
        "hwkv policy make duo model.gguf --run policy.calib --window 252 --sink 4 --retention 0.5 -c 8192 -o duo.json",
    )
    command.add_argument(
        "--run",
        dest="folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder of hwkv calibrate --method leastkl",
    )
    command.add_argument(
        "--window",
        type=options.tokens,
        required=True,
        metavar="N",
        help="window of the other heads, a candidate of the run",
    )
    _budget_flags(command, command.add_mutually_exclusive_group(required=True))
    _sink_flag(command, 4)

    command = kind(
        "random",
        run_make_random,
        "windows drawn by chance, as a control",
        "Every KV head draws one of the windows, all with the same chance. Under a budget, heads draw in random order"
        " among the windows that still fit, and again upwards, until none can take its next longer window.",
        "hwkv policy make random model.gguf --windows 256,1024,full --seed 1 -o policy.json",
    )
    command.add_argument(
        "--windows", type=_row, required=True, metavar="ROW", help='windows to draw from, as "256,1024,full"'
    )
    command.add_argument(
        "--seed",
        type=options.whole(0, "a seed"),
        default=0,
        metavar="N",
        help="the same seed draws the same (default: %(default)s)",
    )
    _sink_flag(command, 0)
    _budget_flags(command, command.add_mutually_exclusive_group())

    command = kind(
        "matrix",
        run_make_matrix,
        "windows from a file",
        'One row per configurable layer, in order; one cell per KV head: "full" or a number of tokens. CSV, or JSON'
        " as a list of rows or an object of layer: row.",
        "hwkv policy make matrix model.gguf --matrix windows.csv -o policy.json",
    )
    command.add_argument("--matrix", type=Path, required=True, metavar="FILE", help="windows as .csv or .json")

    command = kind(
        "pattern",
        run_make_pattern,
        "one row of windows for all layers, other rows for some",
        "A row has one window per KV head. Without --pattern, layers that no --layer names stay full.",
        'hwkv policy make pattern model.gguf --pattern "full,512,512,full" --layer 3:full,64,64,64 -o policy.json',
    )
    command.add_argument(
        "--pattern", type=_row, metavar="ROW", help='windows of the KV heads of every layer, as "full,512,512,full"'
    )
    command.add_argument(
        "--layer",
        type=_layer_row,
        action="append",
        default=[],
        metavar="L:ROW",
        help="windows of one layer; may be given again for others",
    )

    command = _add(
        policies,
        "show",
        run_show,
        "a policy as a table, and as a picture",
        "With --model the layers that the policy leaves full are shown, too.",
        "hwkv policy show policy.json --plot policy.png",
    )
    command.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    command.add_argument("-m", "--model", type=Path, metavar="MODEL", help="GGUF file of its model")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write a heatmap as .png, .svg or .pdf")
    _force_flag(command)
    _json_flag(command)

    command = _add(
        policies,
        "check",
        run_check,
        "does a policy fit a model, and what does it save",
        "Exit code 0 if it fits, 1 with the reason if not.",
        "hwkv policy check model.gguf policy.json -c 32768",
    )
    command.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    command.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    command.add_argument(
        "-c",
        "--ctx-size",
        type=options.tokens,
        default=0,
        metavar="N",
        help="context to predict KV bytes for, with F16 K and V and one sequence (default: the trained one)",
    )
    _json_flag(command)


# commands


def run_info(args):
    from ..gguf.embed import read_policy
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    policy = read_policy(args.model)
    if args.json:
        return _print_json(
            {
                "architecture": geometry.architecture,
                "name": geometry.name,
                "n_layer": geometry.n_layer,
                "n_ctx_train": geometry.n_ctx_train,
                "configurable_layers": [
                    {
                        "layer": x.layer,
                        "n_head": x.n_head,
                        "n_head_kv": x.n_head_kv,
                        "head_dim_k": x.head_dim_k,
                        "head_dim_v": x.head_dim_v,
                    }
                    for x in geometry.configurable
                ],
                "other_layers": [{"layer": x.layer, "kind": x.kind} for x in geometry.layers if x.kind != "attention"],
                "kv_bytes_per_token": geometry.kv_bytes_per_token,
                "refusal": geometry.refusal,
                "fingerprint": geometry.fingerprint,
                "policy": None if policy is None else policy.summary(geometry),
            }
        )

    per_token = geometry.kv_bytes_per_token
    _print_facts(
        [
            ("model", geometry.name),
            ("architecture", geometry.architecture),
            ("layers", f"{geometry.n_layer}, {len(geometry.configurable)} take windows"),
            ("trained context", f"{geometry.n_ctx_train:,} tokens"),
            ("KV per token", f"{per_token:,} bytes (F16, layers that take windows)"),
            ("KV at that context", f"{per_token * geometry.n_ctx_train / MIB:,.1f} MiB with every head full"),
            ("policy", "none embedded" if policy is None else policy.summary(geometry)),
        ]
    )
    if geometry.refusal:
        _out().print(f"no policy fits this model: {geometry.refusal}", markup=False)
    if geometry.layers:
        groups = {}
        for x in geometry.layers:
            what = "takes windows" if x.kind == "attention" else x.reason
            groups.setdefault((x.kind, x.n_head, x.n_head_kv, x.head_dim_k, x.head_dim_v, what), []).append(x.layer)
        table = _table("layers", "kind", "query heads", "KV heads", "K, V size", "")
        for (kind, n_head, n_head_kv, k, v, what), layers in groups.items():
            with_kv = kind in ("attention", "swa", "unsupported")
            shape = (str(n_head), str(n_head_kv), f"{k}, {v}") if with_kv else ("-", "-", "-")
            table.add_row(_ranges(layers), kind, *shape, what.removeprefix("it "))
        _out().print(table)


def run_make_uniform(args):
    from ..baselines import handmade
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    _write_made(
        args,
        geometry,
        _of_window(args, geometry, lambda window: handmade.uniform(geometry, window, args.keep_full, args.sink)),
    )


def run_make_streaming(args):
    from ..baselines import handmade
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    _write_made(
        args, geometry, _of_window(args, geometry, lambda window: handmade.streaming(geometry, window, args.sink))
    )


def run_make_duo(args):
    from ..baselines import handmade
    from ..calibration.methods.leastkl import expected_losses
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    windows, losses = expected_losses(args.folder, geometry, args.sink)
    if args.window not in windows:
        raise HwkvError(
            f"--window is {args.window}; the run in {args.folder} has the candidates {', '.join(map(str, windows))}"
        )
    at = windows.index(args.window)
    _write_made(
        args,
        geometry,
        handmade.duo(
            geometry, {il: rows[:, at] for il, rows in losses.items()}, args.window, _budget(args, geometry), args.sink
        ),
    )


def run_make_random(args):
    from ..baselines import handmade
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    _write_made(
        args, geometry, handmade.random_windows(geometry, args.windows, args.seed, args.sink, _budget(args, geometry))
    )


def run_make_matrix(args):
    from ..baselines import handmade
    from ..gguf.geometry import ModelGeometry

    geometry = ModelGeometry.from_gguf(args.model)
    _write_made(args, geometry, handmade.matrix(geometry, args.matrix))


def run_make_pattern(args):
    from ..baselines import handmade
    from ..gguf.geometry import ModelGeometry

    if not args.pattern and not args.layer:
        raise HwkvError("a pattern needs --pattern or --layer")
    layers = dict(args.layer)
    if len(layers) != len(args.layer):
        raise HwkvError("--layer names a layer twice")
    geometry = ModelGeometry.from_gguf(args.model)
    _write_made(args, geometry, handmade.pattern(geometry, args.pattern, layers))


def run_show(args):
    from ..gguf.geometry import ModelGeometry
    from ..policy.policy import Policy

    policy = Policy.load(args.policy)
    geometry = None
    if args.model:
        geometry = ModelGeometry.from_gguf(args.model)
        policy.check(geometry, args.policy)
    if args.plot:
        from ..plot.heatmap import plot

        plot(policy, args.plot, geometry, overwrite=args.force, title=(policy.model or {}).get("name"))

    rows = {x.layer: policy.row(x) for x in geometry.configurable} if geometry else policy.layers
    n_ctx_train = geometry.n_ctx_train if geometry else 2**17
    lengths = [t for t in (2048, 8192, 32768, 131072) if t < n_ctx_train] + [n_ctx_train]
    retention = {t: policy.retention(t, geometry) for t in lengths}
    if args.json:
        return _print_json(
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
    _print_facts(
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
        width = max(len(_window(w)) for row in rows.values() for w in row)
        table = _table("layer", "windows, by KV head")
        for il, row in rows.items():
            table.add_row(str(il), "  ".join(f"{_window(w):>{width}}" for w in row))
        _out().print(table)


def run_check(args):
    from ..gguf.geometry import ModelGeometry
    from ..policy.footprint import predict
    from ..policy.policy import Policy

    _check_order(args)
    geometry = ModelGeometry.from_gguf(args.model)
    policy = Policy.load(args.policy)
    policy.check(geometry, args.policy)
    geometry.warn_beyond(args.ctx_size)
    footprint = predict(geometry, policy, args.ctx_size)
    retention = policy.retention(args.ctx_size or geometry.n_ctx_train, geometry)
    if args.json:
        return _print_json(
            {
                "fits": True,
                "fingerprint": policy.fingerprint(geometry.n_layer),
                "n_ctx": footprint.n_ctx,
                "retention": retention,
                **footprint.to_dict(),
            }
        )
    _print_facts(
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
        table = _table("window", "layers", "KV heads", "cells", "MiB")
        for group in footprint.groups:
            table.add_row(
                _window(group.window),
                str(len(group.layers)),
                str(group.heads),
                f"{group.cells:,}",
                f"{group.bytes / MIB:,.1f}",
            )
        _out().print(table)


def run_embed(args):
    from ..gguf.embed import embed
    from ..gguf.geometry import ModelGeometry
    from ..policy.policy import Policy

    _check_order(args)
    policy = Policy.load(args.policy)
    policy.check(ModelGeometry.from_gguf(args.model), args.policy)  # here, because here it has a file name
    paths = embed(args.model, policy, args.output, force=args.force, link_shards=args.link, progress=True)
    if args.json:
        return _print_json({"written": [str(path) for path in paths]})
    for path in paths:
        print(f"wrote {path}")


def run_extract(args):
    from ..gguf.embed import read_policy

    policy = read_policy(args.model)
    if policy is None:
        raise HwkvError(f"{args.model}: has no embedded policy")
    _write_policy(args, policy)


# options


def _add(commands, name, run, text, details, example):
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}. {details}",
        formatter_class=_HelpFormatter,
        epilog=f"example:\n  {example}",
    )
    command.set_defaults(run=run)
    return command


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, keeps the example's lines."""

    def _fill_text(self, text, width, indent):
        if text.startswith("example:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def _output_flag(command):
    command.add_argument("-o", "--output", type=Path, metavar="POLICY.json", help="file to write (default: print it)")
    _force_flag(command)


def _force_flag(command):
    command.add_argument("--force", action="store_true", help="replace a file that exists")


def _json_flag(command):
    command.add_argument("--json", action="store_true", help="print JSON")


def _sink_flag(command, default):
    command.add_argument(
        "--sink",
        type=options.whole(0, "a number of tokens"),
        default=default,
        metavar="N",
        help="first tokens that every KV head keeps, too (default: %(default)s)",
    )


def _window_flags(command):
    group = command.add_mutually_exclusive_group(required=True)
    group.add_argument("--window", type=options.tokens, metavar="N", help="tokens that every KV head keeps")
    _budget_flags(command, group)


def _budget_flags(command, group):
    group.add_argument(
        "--retention",
        type=float,
        metavar="R",
        help="share of the cells to keep at the context of -c, 0 to 1: as much as fits",
    )
    group.add_argument(
        "--budget-bytes", type=sizes.parse, metavar="SIZE", help="KV memory to allocate there, such as 1.5GiB or 300MiB"
    )
    command.add_argument(
        "-c",
        "--ctx-size",
        type=options.tokens,
        metavar="N",
        help="context of --retention or --budget-bytes, with F16 K and V and one sequence (default: the trained one)",
    )


def _check_order(args):
    """MODEL and POLICY are easily given the other way round."""
    from ..gguf.file import MAGIC

    def is_gguf(path):
        with open(path, "rb") as file:
            return file.read(4) == MAGIC

    with suppress(OSError):  # whoever reads it says why
        if not is_gguf(args.model) and is_gguf(
            args.policy
        ):  # a policy may come from a pipe, and is not read before its time
            raise HwkvError(f"{args.model}: not a GGUF file, but {args.policy} is one: MODEL comes first, then POLICY")


def _budget(args, geometry):
    from ..policy.budget import Budget

    if args.retention is None and args.budget_bytes is None:
        if args.ctx_size is not None:
            raise HwkvError("-c is the context of --retention or --budget-bytes; neither is given")
        return None
    geometry.warn_beyond(args.ctx_size or 0)
    return Budget(args.ctx_size or geometry.n_ctx_train, args.retention, args.budget_bytes)


def _of_window(args, geometry, make):
    """make(window) for the --window, or for the largest within the budget."""
    from ..baselines import handmade

    budget = _budget(args, geometry)
    return make(args.window) if budget is None else handmade.largest(geometry, budget, make)


def _row(text):
    from ..baselines.handmade import parse_row

    try:
        return parse_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _layer_row(text):
    layer, colon, row = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not LAYER:ROW, as in 3:full,64,64,64")
    return _index(layer), _row(row)


def _heads(text):
    pairs = []
    for item in text.split(","):
        layer, colon, head = item.partition(":")
        pairs.append((_index(layer), _index(head) if colon else None))
    return pairs


def _index(text):
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of a layer or KV head")
    return int(text)


# output


def _out():
    from rich.console import Console

    # piped output keeps whole lines: nothing is cut to a terminal's width
    return Console(highlight=False, **({} if sys.stdout.isatty() else {"width": 240}))


def _table(*columns):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        numeric = name in ("query heads", "KV heads", "K, V size", "cells", "MiB", "layer", "window")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def _print_facts(facts):
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        _out().print(f"{name:<{width}}  {value}", markup=False, soft_wrap=True)


def _print_json(value):
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _write_policy(args, policy):
    if args.output is None:
        sys.stdout.write(policy.to_json())
        return
    policy.save(args.output, overwrite=args.force)
    print(f"wrote {args.output}")


def _write_made(args, geometry, policy):
    _write_policy(args, policy)
    if args.output is not None:
        n = geometry.n_ctx_train
        print(f"it keeps {policy.retention(n, geometry):.1%} of the KV cells at {n:,} tokens, the trained context")


def _made_by(provenance):
    """[("made by", line)] of what matters most in a provenance, which may be any JSON object; all of it is in --json."""
    if not provenance:
        return []
    budget = provenance.get("budget") if isinstance(provenance.get("budget"), dict) else provenance
    words = [str(provenance.get("method", "unknown"))]
    words += [f"{key} {provenance[key]}" for key in ("tau", "window", "pattern", "seed") if key in provenance]
    for key, text in (("retention", "share of the cells"), ("budget_bytes", "bytes")):
        if key in budget:
            words.append(f"a budget of {budget[key]} ({text} at {budget.get('n_ctx', 'all')} tokens)")
    lines = [", ".join(words)]
    if "windows" in provenance:
        windows = provenance["windows"]
        lines.append(f"from windows of {', '.join(map(str, windows)) if isinstance(windows, list) else windows} tokens")
    if isinstance(trace := provenance.get("trace"), dict):
        text = trace.get("text")
        text = (
            "the text that ships"
            if text == "default"
            else ", ".join(map(str, text))
            if isinstance(text, list)
            else text
        )
        lines.append(f"on traces of {provenance.get('n_ctx')} tokens of {text}")
    return [("" if i else "made by", line) for i, line in enumerate(lines)]


def _window(window):
    return "full" if window is None else str(window)


def _ranges(numbers):
    """0-4, 6: runs of consecutive numbers."""
    runs = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _close_stdout():
    """Drops what is still buffered, so that Python does not fail on it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(signum, frame):
    raise SystemExit(128 + signum)
