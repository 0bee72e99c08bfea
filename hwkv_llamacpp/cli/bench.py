"""`hwkv bench memory|throughput|capacity`: fresh-server measurements, each case a row of a JSONL file."""

import argparse
from pathlib import Path

from ..base import options, sizes
from ..errors import HwkvError
from ..measure import boundary
from ..measure.case import Settings
from ..measure.grid import ARMS, Grid
from ..report.page import print_medians
from .arguments import add_context_arguments

HIGHEST_CTX = 2**21
KINDS = {
    "memory": "peak memory against the context",
    "throughput": "prefill and decode speed against the context",
    "capacity": "the largest context that a memory limit, or the GPU, holds",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures fresh llama-server processes: upstream's, ours with full KV, ours under policies.\nEvery case is a "
        "row of a JSONL file that `hwkv report` reads; a run that was stopped goes on where it stopped."
    )
    parser.epilog = (
        "example:\n  hwkv bench memory model.gguf --policy policy.json -c 2048,8192,32768 -o run.jsonl\n"
        "  hwkv bench capacity model.gguf --policy policy.json --memory-limit 3GiB -o run.jsonl\n"
        "  hwkv report run.jsonl -o report"
    )
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for kind, text in KINDS.items():
        command = kinds.add_parser(
            kind,
            help=text,
            description=f"Measures {text}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=parser.epilog,
        )
        command.set_defaults(kind=kind)
        add = command.add_argument
        add("model", type=Path, metavar="MODEL", help="GGUF file")
        add(
            "--policy",
            type=Path,
            action="append",
            default=[],
            metavar="P",
            help="policy, an arm by its file's name; may be given again (default: the one in MODEL, if it has one)",
        )
        add("--arms", type=_arms, default=list(ARMS), metavar="A,...", help=f"arms to run (default: {','.join(ARMS)})")
        add("-o", "--output", type=Path, required=True, metavar="RUN.jsonl", help="file that rows are added to")
        add(
            "--memory-limit",
            type=sizes.parse,
            metavar="SIZE",
            help="limit of the server process, such as 3GiB: a control group where one can be made, else of its"
            " address space",
        )
        if kind == "capacity":
            add(
                "--highest",
                type=options.count,
                default=HIGHEST_CTX,
                metavar="N",
                help="largest context to try (default: %(default)s)",
            )
            add(
                "--grid",
                type=options.count,
                default=boundary.GRID,
                metavar="N",
                help="step of the search in tokens (default: %(default)s)",
            )
        else:
            add(
                "-c", "--ctx-size", type=options.listed(options.tokens), required=True, metavar="N,...", help="contexts"
            )
            add(
                "-r",
                "--repetitions",
                type=options.count,
                default=3,
                metavar="N",
                help="repetitions of every case (default: %(default)s)",
            )
        add(
            "-n",
            "--n-predict",
            type=options.count,
            default=64,
            metavar="N",
            help="tokens to generate, at the end of the context (default: 64)",
        )
        add("-t", "--threads", type=options.count, metavar="N", help="threads (default: llama.cpp's)")
        add(
            "-lm",
            "--load-mode",
            choices=("none", "mmap"),
            default="none",
            help="how weights are loaded; mapped ones are file pages, which the kernel takes back under pressure"
            " (default: none)",
        )
        add(
            "--timeout",
            type=options.seconds,
            default=3600,
            metavar="S",
            help="seconds until a request counts as hung (default: %(default)s)",
        )
        add(
            "--start-timeout",
            type=options.seconds,
            default=600,
            metavar="S",
            help="seconds until a start counts as hung (default: %(default)s)",
        )
        add("--logs", type=Path, metavar="DIR", help="keep the servers' logs here")
        add_context_arguments(command)


def run(args: argparse.Namespace) -> None:
    settings = Settings(
        args.model,
        args.n_predict,
        args.batch_size,
        args.ubatch_size,
        args.threads,
        args.gpu_layers,
        args.cache_type_k,
        args.cache_type_v,
        args.load_mode,
        args.start_timeout,
        args.timeout,
        args.memory_limit,
    )
    grid = Grid(args.kind, settings, args.arms, args.policy, args.output, args.logs)
    if args.kind == "capacity":
        grid.capacity(args.grid, args.highest)
        return
    rows = grid.cases(args.ctx_size, args.repetitions)
    print_medians(rows, args.kind)
    bad = [row for row in rows if row.status != "ok"]
    if bad:
        first = bad[0]
        raise HwkvError(
            f"{len(bad)} of {len(rows)} cases did not succeed, the first is {first.arm} at {first.n_ctx}: "
            f"{first.status} in {first.phase}, {first.cause}"
        )


def _arms(text: str):
    names = text.split(",")
    for name in names:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is not an arm: {', '.join(ARMS)} expected")
    return list(dict.fromkeys(names))
