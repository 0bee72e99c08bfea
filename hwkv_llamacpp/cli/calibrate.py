"""`hwkv calibrate`: finds a policy for a GGUF."""

import argparse
import json
import os
import sys
from pathlib import Path

from ..base import sizes
from ..base.atomic import check_target
from ..base.options import count, from_zero, listed, share
from ..calibration.calibrate import asked_budget, find
from ..calibration.files import to_data
from ..calibration.method import Method, methods
from ..calibration.run import Settings, check_model
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..plot import pareto
from ..plot.heatmap import plot
from ..policy.footprint import CACHE_TYPES
from ..runtime.context import RuntimeOptions
from .records import print_records

SINK = 4  # four sink tokens take no more than a few cells, and let most heads have short windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds a window for each KV head of a model. Every record that a method finds is measured on held-out text, and"
        " the one that suits the budget is written. Text like what the model will read gives the best windows: give"
        " your own with --text. Interrupted, the same command goes on where it stopped."
    )
    parser.epilog = (
        "example:\n  hwkv calibrate model.gguf -o policy.json --budget 0.7 -c 32768\n"
        "  hwkv calibrate model.gguf -o policy.json --text book.txt --text chats.txt --trace-tokens 16384"
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file, as it will be served")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="POLICY.json", help="file to write the selected policy to"
    )
    parser.add_argument("--force", action="store_true", help="replace a policy file that exists")
    parser.add_argument(
        "--run",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="folder that keeps the run: scores, records, pictures (default: OUTPUT, with .calib for .json)",
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON")

    selection = parser.add_argument_group("selection (default: --budget 0.7)").add_mutually_exclusive_group()
    selection.add_argument(
        "--budget",
        type=share,
        metavar="SHARE",
        help="least distortion among the policies that keep at most this share of the KV cells",
    )
    selection.add_argument(
        "--budget-bytes",
        type=sizes.parse,
        metavar="N",
        help="the same in bytes of allocated KV cache, such as 4GiB or 500MiB",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=count,
        default=0,
        metavar="N",
        help="context that the budget is meant for (default: the trained one)",
    )

    group = parser.add_argument_group("calibration")
    group.add_argument("--method", choices=methods(), default="seqcalib", help="default: %(default)s")
    group.add_argument(
        "--sink",
        type=from_zero,
        action="append",
        metavar="N",
        help="first tokens that every window sees, may be given again to calibrate several numbers"
        f" (default: {SINK}; the paper: 0)",
    )
    group.add_argument(
        "--windows",
        type=listed(count),
        metavar="N,...",
        help="candidate windows in tokens (default: powers of two from 256 to half of the trace, less the sinks)",
    )
    group.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text to calibrate on, may be given again (default: a mix that ships)",
    )
    group.add_argument(
        "--held-out-text",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text to measure on (default: the end of --text)",
    )
    group.add_argument(
        "--trace-tokens",
        type=count,
        default=4096,
        metavar="N",
        help="length of each of up to three traces (default: %(default)s)",
    )
    group.add_argument(
        "--queries",
        type=count,
        default=128,
        metavar="N",
        help="queries that are scored in each trace (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=from_zero,
        default=0,
        metavar="N",
        help="of the choice of texts and queries (default: %(default)s)",
    )

    for name, method in methods().items():
        add_own_arguments(parser, name, method)

    group = parser.add_argument_group("runtime, as the model will be served")
    group.add_argument(
        "-ub", "--ubatch-size", type=count, default=512, metavar="N", help="physical batch size (default: %(default)s)"
    )
    for letter in "kv":
        group.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default="f16",
            metavar="TYPE",
            help=f"{letter.upper()} cache type: {', '.join(CACHE_TYPES)} (default: %(default)s)",
        )
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        dest="n_gpu_layers",
        type=int,
        metavar="N",
        help="layers on the GPU (default: llama.cpp's)",
    )
    group.add_argument("-t", "--threads", type=count, metavar="N", help=f"CPU threads (default: {os.cpu_count()})")


def add_own_arguments(parser: argparse.ArgumentParser, name: str, method: type[Method]) -> None:
    """Adds the options that a method brings, in a group of their own. HwkvError if one is there already."""
    group = parser.add_argument_group(f"--method {name}", method.help)
    try:
        method.add_arguments(group)
    except argparse.ArgumentError as error:
        raise HwkvError(f"the method {name} adds an option that is there already: {error}") from None


def check_own_arguments(args: argparse.Namespace) -> None:
    """HwkvError if an option of another method is given."""
    for name, method in methods().items():
        own = argparse.ArgumentParser(add_help=False)
        method.add_arguments(own.add_argument_group())
        for key, default in vars(own.parse_args([])).items():
            if name != args.method and getattr(args, key) != default:
                raise HwkvError(f"--{key.replace('_', '-')} is an option of the method {name}, not of {args.method}")


def run(args: argparse.Namespace) -> None:
    check_target(args.output, args.force)
    parent = args.output.parent
    if not os.access(parent, os.W_OK):  # better said before hours of work than after
        raise HwkvError(
            f"{args.output}: cannot write: {parent} {'is read-only' if parent.is_dir() else 'is no folder'}"
        )
    folder = args.folder or args.output.with_name(f"{args.output.name.removesuffix('.json')}.calib")
    if folder.resolve() == args.output.resolve():
        raise HwkvError(
            f"{args.output}: is the policy to write, and by --run the folder of the run, too: two names expected"
        )
    check_own_arguments(args)
    method = methods()[args.method].from_arguments(args)
    settings = Settings(tuple(args.sink or (SINK,)), args.windows and tuple(args.windows), args.queries, args.seed)
    options = RuntimeOptions(args.ubatch_size, args.cache_type_k, args.cache_type_v, args.n_gpu_layers, args.threads)
    geometry = ModelGeometry.from_gguf(args.model)
    check_model(geometry)
    if args.ctx_size > geometry.n_ctx_train:
        print(
            f"warning: {args.model} was trained with a context of {geometry.n_ctx_train:,};"
            f" the budget is meant for {args.ctx_size:,}",
            file=sys.stderr,
        )
    budget = asked_budget(geometry, options, args.budget, args.budget_bytes, args.ctx_size)
    try:
        records = find(
            args.model,
            geometry,
            folder,
            method=method,
            text=args.text,
            held_out_text=args.held_out_text,
            n_tokens=args.trace_tokens,
            settings=settings,
            options=options,
            budget=budget,
            progress=sys.stderr.isatty() or not args.json,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on from here") from None
    try:
        selected = method.select(records, geometry, budget)
    except HwkvError:
        if not args.json:
            print_records(records)  # what there is to choose from
        raise
    selected.policy.save(args.output, overwrite=args.force)
    pareto.plot(records, folder / "pareto.png", selected, title=geometry.name)
    for record in records:
        sinks = f", n_sink {record.n_sink}" if record.n_sink else ""
        picture = folder / f"policy-{record.file_stem}.png"
        plot(record.policy, picture, geometry, overwrite=True, title=f"{geometry.name}, {record.label}{sinks}")
    if args.json:
        found = {
            "selected": {**selected.setting, "n_sink": selected.n_sink},
            "policy": str(args.output),
            "run": str(folder),
            "records": [to_data(record) for record in records],
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print_records(records, selected)
    print(f"wrote {args.output} ({selected.label}: {selected.policy.summary(geometry)})")
    print(f"scores, records and pictures are in {folder}")
