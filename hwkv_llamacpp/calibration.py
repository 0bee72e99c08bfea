"""`hwkv calibrate`: finds a policy for a GGUF. Trace, scores, records, selection, pictures."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from . import pareto, selection, seqcalib, trace as traces
from .atomic import check_target
from .errors import HwkvError
from .footprint import CACHE_TYPES
from .geometry import ModelGeometry
from .heatmap import plot
from .runtime import Model, RuntimeOptions

BUDGET = 0.70  # the paper's policy of Qwen3.6-27B keeps 0.69


@dataclass(frozen=True)
class Calibration:
    """All records, and the one selected."""

    records: list
    selected: seqcalib.Record


def calibrate(model_path, folder, *, text=(), held_out_text=(), n_tokens=4096, settings=seqcalib.Settings(), options=RuntimeOptions(),
              budget=None, budget_bytes=None, tau=None, n_ctx=0, progress=True):
    """Calibrates a policy for the model and selects one record.

    folder: keeps the run, which a later call with the same arguments goes on with. text: files to calibrate on instead of the default
    trace; held_out_text: files to measure on. n_tokens: length of each trace. options: how the model will be served.
    Of budget (retention, 0 to 1), budget_bytes and tau at most one; the budget holds at n_ctx tokens (0: the trained context).
    Returns a Calibration. HwkvError says what cannot be.
    """
    if sum(x is not None for x in (budget, budget_bytes, tau)) > 1:
        raise HwkvError("of a retention budget, a budget in bytes and a tau at most one can select")
    if tau is not None and tau not in settings.taus:
        raise HwkvError(f"tau {tau:g} is not calibrated; the thresholds are {', '.join(f'{t:g}' for t in settings.taus)}")
    geometry = ModelGeometry.from_gguf(model_path)
    seqcalib.check_model(geometry)
    n_ctx = n_ctx or geometry.n_ctx_train
    settings.candidates(n_tokens)
    if n_tokens > geometry.n_ctx_train:
        raise HwkvError(f"a trace of {n_tokens} tokens is asked for, but the model was trained with a context of {geometry.n_ctx_train}:"
                        " a lower --trace-tokens expected")
    with Model(model_path, options) as model:
        if text:
            trace = traces.from_files(model, text, n_tokens, held_out_paths=held_out_text)
        else:
            trace = traces.default(model, n_tokens, settings.seed)
        records = seqcalib.calibrate(model, geometry, trace, folder, settings, lengths=(n_ctx, geometry.n_ctx_train),
                                     model_sha256=_sha256(model_path, progress), progress=progress)
    if tau is not None:
        selected = selection.by_tau(records, tau)
    elif budget_bytes is not None:
        selected = selection.by_bytes(records, geometry, budget_bytes, n_ctx, n_ubatch=options.n_ubatch, type_k=options.type_k, type_v=options.type_v)
    else:
        selected = selection.by_retention(records, geometry, BUDGET if budget is None else budget, n_ctx)
    return Calibration(records, selected)


def add_arguments(parser):
    parser.description = (
        "Finds a window for each KV head: the layers are taken from below, each with the lower ones already under their windows, and each"
        " KV head gets the shortest window under which its output on a trace stays as near to full history as a threshold asks"
        " (SeqCalib). There is one record per threshold, measured on held-out text; the one that suits the budget is written."
        " Text like what the model will read gives the best windows: give your own with --text."
        " Interrupted, the same command goes on where it stopped.")
    parser.epilog = ("example:\n  hwkv calibrate model.gguf -o policy.json --budget 0.7 -c 32768\n"
                     "  hwkv calibrate model.gguf -o policy.json --text book.txt --text chats.txt --trace-tokens 16384")
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file, as it will be served")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="POLICY.json", help="file to write the selected policy to")
    parser.add_argument("--force", action="store_true", help="replace a policy file that exists")
    parser.add_argument("--run", dest="folder", type=Path, metavar="DIR", help="folder that keeps the run: scores, records, pictures (default: OUTPUT without .json, and .calib)")
    parser.add_argument("--json", action="store_true", help="print the records as JSON")

    group = parser.add_argument_group("selection (default: --budget 0.7)").add_mutually_exclusive_group()
    group.add_argument("--budget", type=_share, metavar="SHARE", help="least distortion among the policies that keep at most this share of the KV cells")
    group.add_argument("--budget-bytes", type=_bytes, metavar="N", help="the same in bytes of allocated KV cache, such as 4GiB or 500MiB")
    group.add_argument("--tau", type=_threshold, metavar="T", help="the policy of this threshold; without --taus, the only one calibrated")
    parser.add_argument("-c", "--ctx-size", type=_count, default=0, metavar="N", help="context that the budget is meant for (default: the trained one)")

    group = parser.add_argument_group("calibration")
    group.add_argument("--taus", type=_list(_threshold), metavar="T,...", help=f"thresholds (default: {','.join(f'{t:g}' for t in seqcalib.TAUS)})")
    group.add_argument("--sink", type=_from_zero, action="append", metavar="N",
                       help="first tokens that every window sees, may be given again to calibrate several numbers (default: 0)")
    group.add_argument("--windows", type=_list(_count), metavar="N,...", help="candidate windows in tokens (default: powers of two from 256 to half of the trace)")
    group.add_argument("--text", type=Path, action="append", default=[], metavar="FILE", help="text to calibrate on, may be given again (default: a mix that ships)")
    group.add_argument("--held-out-text", type=Path, action="append", default=[], metavar="FILE", help="text to measure on (default: the end of --text)")
    group.add_argument("--trace-tokens", type=_count, default=4096, metavar="N", help="length of each of up to three traces (default: %(default)s)")
    group.add_argument("--queries", type=_count, default=128, metavar="N", help="queries that are scored in each trace (default: %(default)s)")
    group.add_argument("--seed", type=_from_zero, default=0, metavar="N", help="of the choice of texts and queries (default: %(default)s)")

    group = parser.add_argument_group("runtime, as the model will be served")
    group.add_argument("-ub", "--ubatch-size", type=_count, default=512, metavar="N", help="physical batch size (default: %(default)s)")
    for letter in "kv":
        group.add_argument(f"-ct{letter}", f"--cache-type-{letter}", choices=CACHE_TYPES, default="f16", metavar="TYPE",
                           help=f"{letter.upper()} cache type: {', '.join(CACHE_TYPES)} (default: %(default)s)")
    group.add_argument("-ngl", "--n-gpu-layers", type=int, metavar="N", help="layers on the GPU (default: llama.cpp's)")
    group.add_argument("-t", "--threads", type=_count, metavar="N", help=f"CPU threads (default: {os.cpu_count()})")


def run(args):
    check_target(args.output, args.force)
    parent = args.output.parent
    if not os.access(parent, os.W_OK):  # said before hours of work, not after
        raise HwkvError(f"{args.output}: cannot write: {parent} {'is read-only' if parent.is_dir() else 'is no folder'}")
    folder = args.folder or args.output.with_suffix(".calib")
    taus = args.taus or ((args.tau,) if args.tau is not None else seqcalib.TAUS)
    settings = seqcalib.Settings(tuple(taus), tuple(args.sink or (0,)), args.windows and tuple(args.windows), args.queries, args.seed)
    options = RuntimeOptions(args.ubatch_size, args.cache_type_k, args.cache_type_v, args.n_gpu_layers, args.threads)
    result = calibrate(args.model, folder, text=args.text, held_out_text=args.held_out_text, n_tokens=args.trace_tokens, settings=settings,
                       options=options, budget=args.budget, budget_bytes=args.budget_bytes, tau=args.tau, n_ctx=args.ctx_size,
                       progress=sys.stderr.isatty() or not args.json)
    geometry = ModelGeometry.from_gguf(args.model)
    pareto.plot(result.records, folder / "pareto.png", result.selected, title=geometry.name)
    for record in result.records:
        plot(record.policy, folder / f"policy-sink{record.n_sink}-tau{record.tau}.png", geometry, overwrite=True,
             title=f"{geometry.name}, tau {record.tau:g}" + f", n_sink {record.n_sink}" * (record.n_sink > 0))
    result.selected.policy.save(args.output, overwrite=args.force)
    if args.json:
        print(json.dumps({"selected": {"tau": result.selected.tau, "n_sink": result.selected.n_sink}, "policy": str(args.output), "run": str(folder),
                          "records": [json.loads(record.to_json()) for record in result.records]}, indent=2, ensure_ascii=False))
        return
    pareto.print_table(result.records, result.selected)
    print(f"wrote {args.output} (tau {result.selected.tau:g}: {result.selected.policy.summary(geometry)})")
    print(f"scores, records and pictures are in {folder}")


def _sha256(path, progress):
    """Of the model file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, desc="hash", delay=2, disable=not progress) as bar:
        while block := file.read(1 << 24):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


# option values

def _error(text, expected):
    import argparse

    return argparse.ArgumentTypeError(f"{text[:40]!r} is not {expected}")


def _share(text):
    return _number(text, "a share above 0 and up to 1")


def _threshold(text):
    return _number(text, "a threshold above 0 and up to 1")


def _number(text, expected):
    try:
        value = float(text)
    except ValueError:
        raise _error(text, expected) from None
    if not 0 < value <= 1:
        raise _error(text, expected)
    return value


def _count(text):
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) < 2**31):
        raise _error(text, f"a number from 1 to {2**31 - 1}")
    return int(text)


def _from_zero(text):
    if not (text.isascii() and text.isdigit() and int(text[:20]) < 2**31):
        raise _error(text, f"a number from 0 to {2**31 - 1}")
    return int(text)


def _list(item):
    return lambda text: [item(part) for part in text.split(",")]


def _bytes(text):
    for suffix, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("", 1)):
        if text.endswith(suffix):
            try:
                value = float(text.removesuffix(suffix)) * factor
            except ValueError:
                break
            if 1 <= value < 2**63:
                return int(value)
            break
    raise _error(text, "a size such as 4GiB, 500MiB or a number of bytes")
