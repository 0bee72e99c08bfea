"""`hwkv calibrate`: finds a policy for a GGUF. Trace, scores, records, selection, pictures."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ..base import sizes
from ..base.atomic import check_target
from ..base.options import count, from_zero, listed, share, threshold
from ..errors import HwkvError
from ..gguf import digest
from ..gguf.geometry import ModelGeometry
from ..plot import pareto
from ..plot.heatmap import plot
from ..policy.budget import Budget
from ..policy.footprint import CACHE_TYPES
from ..runtime.context import Model, RuntimeOptions
from . import selection
from . import trace as traces
from .methods import leastkl, seqcalib
from .run import TAUS, Record, Settings, check_model

BUDGET = 0.70  # the paper's policy of Qwen3.6-27B keeps 0.69
SINK = 4  # four sink tokens take no more than a few cells, and let most heads have short windows
METHODS = {"seqcalib": seqcalib.calibrate, "leastkl": leastkl.calibrate}


@dataclass(frozen=True)
class Calibration:
    """All records, and the one selected."""

    records: list
    selected: Record


def calibrate(
    model_path,
    folder,
    *,
    method="seqcalib",
    text=(),
    held_out_text=(),
    n_tokens=4096,
    settings=Settings(),
    options=RuntimeOptions(),
    budget=None,
    budget_bytes=None,
    tau=None,
    n_ctx=0,
    progress=True,
):
    """Calibrates a policy for the model and selects one record.

    folder: keeps the run, which a later call with the same arguments goes on with. method: of METHODS. text: files to calibrate on instead
    of the default trace; held_out_text: files to measure on. n_tokens: length of each trace. options: how the model will be served.
    Of budget (retention, 0 to 1), budget_bytes and tau at most one; the budget holds at n_ctx tokens (0: the trained context).
    Returns a Calibration. HwkvError says what cannot be.
    """
    geometry = ModelGeometry.from_gguf(model_path)
    check_model(geometry)
    records = find(
        model_path,
        geometry,
        folder,
        method=method,
        text=text,
        held_out_text=held_out_text,
        n_tokens=n_tokens,
        settings=settings,
        options=options,
        budget=budget,
        budget_bytes=budget_bytes,
        tau=tau,
        n_ctx=n_ctx,
        progress=progress,
    )
    return Calibration(
        records, select(records, geometry, options, budget=budget, budget_bytes=budget_bytes, tau=tau, n_ctx=n_ctx)
    )


def find(
    model_path,
    geometry,
    folder,
    *,
    method,
    text,
    held_out_text,
    n_tokens,
    settings,
    options,
    budget,
    budget_bytes,
    tau,
    n_ctx,
    progress,
):
    """The records that calibrate() selects from."""
    if sum(x is not None for x in (budget, budget_bytes, tau)) > 1:
        raise HwkvError("of a retention budget, a budget in bytes and a tau at most one can select")
    if method not in METHODS:
        raise HwkvError(f"no method is called {method!r}; there are {', '.join(METHODS)}")
    if held_out_text and not text:
        raise HwkvError("held-out text without text to calibrate on: the default trace has its own")
    if method == "seqcalib" and settings.probe_tokens is not None:
        raise HwkvError("probe tokens are what the method leastkl measures sensitivities on; seqcalib has none")
    n_ctx = n_ctx or geometry.n_ctx_train
    if method == "leastkl":
        if tau is not None:
            raise HwkvError("tau is a threshold of the method seqcalib; leastkl takes a budget")
        # the one that is asked for, and others to compare it with
        asked = (
            Budget(n_ctx, None, budget_bytes, _context(options))
            if budget_bytes is not None
            else Budget(n_ctx, BUDGET if budget is None else budget)
        )
        settings = replace(
            settings, budgets=(*settings.budgets, *(Budget(n_ctx, share) for share in leastkl.SHARES), asked)
        )
    elif tau is not None and tau not in settings.taus:
        raise HwkvError(
            f"tau {tau:g} is not calibrated; the thresholds are {', '.join(f'{t:g}' for t in settings.taus)}"
        )
    for n_sink in settings.sinks:
        settings.candidates(n_tokens, n_sink)
    if n_tokens > geometry.n_ctx_train:
        raise HwkvError(
            f"a trace of {n_tokens} tokens is asked for, but the model was trained with a context of {geometry.n_ctx_train}:"
            " a lower --trace-tokens expected"
        )
    with Model(model_path, options) as model:
        if text:
            trace = traces.from_files(model, text, n_tokens, held_out_paths=held_out_text)
        else:
            trace = traces.default(model, n_tokens, settings.seed)
        return METHODS[method](
            model,
            geometry,
            trace,
            folder,
            settings,
            lengths=(n_ctx, geometry.n_ctx_train),
            model_sha256=digest.of_model(model_path, progress),
            progress=progress,
        )


def select(records, geometry, options, *, budget=None, budget_bytes=None, tau=None, n_ctx=0):
    """The record to deploy. HwkvError if none fits."""
    n_ctx = n_ctx or geometry.n_ctx_train
    if tau is not None:
        return selection.by_tau(records, tau)
    if budget_bytes is not None:
        return selection.by_bytes(records, geometry, budget_bytes, n_ctx, **_context(options))
    return selection.by_retention(records, geometry, BUDGET if budget is None else budget, n_ctx)


def _context(options):
    return {"n_ubatch": options.n_ubatch, "type_k": options.type_k, "type_v": options.type_v}


def add_arguments(parser):
    parser.description = (
        "Finds a window for each KV head: the layers are taken from below, each with the lower ones already under their windows, and each"
        " KV head gets the shortest window under which its output on a trace stays as near to full history as a threshold asks"
        " (--method seqcalib). There is one record per threshold, measured on held-out text; the one that suits the budget is written."
        " --method leastkl measures how much each KV head matters to the model's predictions, and spends the budget where it saves most:"
        " slower, and better the less the budget keeps."
        " Text like what the model will read gives the best windows: give your own with --text."
        " Interrupted, the same command goes on where it stopped."
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

    group = parser.add_argument_group("selection (default: --budget 0.7)").add_mutually_exclusive_group()
    group.add_argument(
        "--budget",
        type=share,
        metavar="SHARE",
        help="least distortion among the policies that keep at most this share of the KV cells",
    )
    group.add_argument(
        "--budget-bytes",
        type=sizes.parse,
        metavar="N",
        help="the same in bytes of allocated KV cache, such as 4GiB or 500MiB",
    )
    group.add_argument(
        "--tau",
        type=threshold,
        metavar="T",
        help="the policy of this threshold; without --taus, the only one calibrated",
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
    group.add_argument("--method", choices=METHODS, default="seqcalib", help="default: %(default)s")
    group.add_argument(
        "--taus",
        type=listed(threshold),
        metavar="T,...",
        help=f"thresholds of seqcalib (default: {','.join(f'{t:g}' for t in TAUS)})",
    )
    group.add_argument(
        "--sink",
        type=from_zero,
        action="append",
        metavar="N",
        help=f"first tokens that every window sees, may be given again to calibrate several numbers (default: {SINK}; the paper: 0)",
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
        "--probe-tokens",
        type=count,
        metavar="N",
        help="of each trace, on which leastkl measures how much each KV head matters; few are quick, but do not show what far"
        " tokens are for (default: all)",
    )
    group.add_argument(
        "--seed",
        type=from_zero,
        default=0,
        metavar="N",
        help="of the choice of texts and queries (default: %(default)s)",
    )

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


def run(args):
    check_target(args.output, args.force)
    parent = args.output.parent
    if not os.access(parent, os.W_OK):  # said before hours of work, not after
        raise HwkvError(
            f"{args.output}: cannot write: {parent} {'is read-only' if parent.is_dir() else 'is no folder'}"
        )
    folder = args.folder or args.output.with_name(f"{args.output.name.removesuffix('.json')}.calib")
    if folder.resolve() == args.output.resolve():
        raise HwkvError(
            f"{args.output}: is the policy to write, and by --run the folder of the run, too: two names expected"
        )
    if args.method != "seqcalib" and args.taus:
        raise HwkvError(f"--taus are thresholds of the method seqcalib, not of {args.method}")
    taus = args.taus or ((args.tau,) if args.tau is not None else TAUS)
    settings = Settings(
        tuple(taus),
        tuple(args.sink or (SINK,)),
        args.windows and tuple(args.windows),
        args.queries,
        args.seed,
        probe_tokens=args.probe_tokens,
    )
    options = RuntimeOptions(args.ubatch_size, args.cache_type_k, args.cache_type_v, args.n_gpu_layers, args.threads)
    geometry = ModelGeometry.from_gguf(args.model)
    check_model(geometry)
    if args.ctx_size > geometry.n_ctx_train:
        print(
            f"warning: {args.model} was trained with a context of {geometry.n_ctx_train:,}; the budget is meant for {args.ctx_size:,}",
            file=sys.stderr,
        )
    limits = {"budget": args.budget, "budget_bytes": args.budget_bytes, "tau": args.tau, "n_ctx": args.ctx_size}
    try:
        records = find(
            args.model,
            geometry,
            folder,
            method=args.method,
            text=args.text,
            held_out_text=args.held_out_text,
            n_tokens=args.trace_tokens,
            settings=settings,
            options=options,
            progress=sys.stderr.isatty() or not args.json,
            **limits,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on from here") from None
    try:
        selected = select(records, geometry, options, **limits)
    except HwkvError:
        if not args.json:
            pareto.print_table(records)  # what there is to choose from
        raise
    selected.policy.save(args.output, overwrite=args.force)
    pareto.plot(records, folder / "pareto.png", selected, title=geometry.name)
    for record in records:
        plot(
            record.policy,
            folder / f"policy-{record.file_stem}.png",
            geometry,
            overwrite=True,
            title=f"{geometry.name}, {record.setting}" + f", n_sink {record.n_sink}" * (record.n_sink > 0),
        )
    if args.json:
        print(
            json.dumps(
                {
                    "selected": {"tau": selected.tau, "budget": selected.budget, "n_sink": selected.n_sink},
                    "policy": str(args.output),
                    "run": str(folder),
                    "records": [json.loads(record.to_json()) for record in records],
                },
                indent=2,
                ensure_ascii=False,
            )
        )
        return
    pareto.print_table(records, selected)
    print(f"wrote {args.output} ({selected.setting}: {selected.policy.summary(geometry)})")
    print(f"scores, records and pictures are in {folder}")
