"""What does calibration cost, in prefills of its trace?

Three arms, interleaved, each run in a fresh process with the same trace, thread count and runtime:

    prefill  the sequences of the trace decoded one after another with full KV; only decoding counts
    one      SeqCalib with one threshold
    grid     SeqCalib with the default grid

A calibration is more than decoding. Its parts are timed apart: the runtime (layers decoded one at a time), the replay
of the candidate windows, the rest (contexts, K and V read from the cache, scores, files), and, after all windows are
chosen, the measurement of each record on the held-out text. The figures are medians over rounds of ratios within a
round.

    python bench/calibration.py                                          SmolLM2-135M, three sequences of 4096 tokens
    python bench/calibration.py --quick -m tests/data/mini-hybrid-f16.gguf  sequences of 1024 tokens, one round: a look

Rows append to bench/results/calibration.jsonl, one per round and arm; each stands alone.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import HwkvError, ModelGeometry
from hwkv_llamacpp.calibration import layerwise
from hwkv_llamacpp.calibration import trace as traces
from hwkv_llamacpp.calibration.distortion import DistortionMeter
from hwkv_llamacpp.calibration.layerwise import Layerwise
from hwkv_llamacpp.calibration.methods.seqcalib import SeqCalib
from hwkv_llamacpp.calibration.run import Settings
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import CalibrationRow
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

RESULTS = Path(__file__).parent / "results" / "calibration.jsonl"
SETTINGS = Settings()
BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def measure(model_path, n_tokens, method, options):
    """One arm, in a process of its own: what it took, as the columns of a row. method: None for the plain prefill."""
    with Model(model_path, options) as model:
        trace = traces.default(model, n_tokens)
        geometry = ModelGeometry.from_gguf(model_path)
        spent = prefill(model, trace) if method is None else calibration(model, geometry, trace, method)
        return {"trace_sha256": trace.sha256, "n_tokens": n_tokens, "n_sequences": len(trace.sequences), **spent}


def prefill(model, trace):
    seconds = 0.0
    for tokens in trace.sequences:
        last = [False] * (len(tokens) - 1) + [True]
        with model.context(None, len(tokens), n_batch=len(tokens)) as context:
            start = time.perf_counter()
            context.decode(tokens, 0, last)
            seconds += time.perf_counter() - start
    return {"prefill_s": seconds}


def calibration(model, geometry, trace, method):
    spent = Counter()

    def timed(owner, name, part):
        function = getattr(owner, name)

        def clocked(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, clocked)

    timed(Layerwise, "run", "runtime_s")
    timed(layerwise, "replay", "replay_s")
    timed(DistortionMeter, "measure", "held_out_s")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = method.calibrate(model, geometry, trace, folder, SETTINGS, progress=False)
        total = time.perf_counter() - start
        scored = [int(path.name.split("-")[0]) for path in (Path(folder) / "layers").iterdir()]
    if min(spent[part] for part in ("runtime_s", "replay_s", "held_out_s")) <= 0:
        raise HwkvError(f"a part of the calibration took no time, as measured: {dict(spent)}")
    return {
        "choose_s": total - spent["held_out_s"],
        **spent,
        "n_layers_scored": len(scored),
        "n_layers": len(geometry.configurable),
        "prefills_from_start": sum(layer + 1 for layer in scored) / geometry.n_layer,
        "taus": list(method.taus),
        "sinks": list(SETTINGS.sinks),
        "windows": None if SETTINGS.windows is None else list(SETTINGS.windows),
        "n_queries": SETTINGS.n_queries,
        "seed": SETTINGS.seed,
        "retention_by_tau": {f"{r.setting['tau']:g}": r.retention[len(trace.sequences[0])] for r in found},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="GGUF to measure (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--tau", type=float, default=0.99, help="of the arm with one threshold (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1024 tokens and one round, unless given")
    parser.add_argument("--trace-tokens", type=int, help="length of each trace sequence (default: 4096)")
    parser.add_argument("--rounds", type=int, help="repetitions (default: 3)")
    parser.add_argument(
        "-t", "--threads", type=int, default=os.cpu_count(), help="threads, of NumPy too (default: %(default)s)"
    )
    args = parser.parse_args()

    n_tokens = args.trace_tokens or (1024 if args.quick else 4096)
    rounds = args.rounds or (1 if args.quick else 3)
    model = args.model or testmodels.smollm2()
    ModelGeometry.from_gguf(model)  # says what is wrong with it
    options = RuntimeOptions(n_threads=args.threads)
    arms = {"prefill": None, "one": SeqCalib((args.tau,)), "grid": SeqCalib()}
    os.environ.update(
        dict.fromkeys(BLAS_THREADS, str(args.threads))
    )  # read by NumPy where it is imported: in the fresh processes

    rows = {}  # by (round, arm)
    runs = [(i, list(arms)[(i + k) % len(arms)]) for i in range(rounds) for k in range(len(arms))]
    spawn = multiprocessing.get_context("spawn")
    for i, arm in tqdm(runs, desc="calibration", unit="run"):
        method = arms[arm]
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            spent = process.submit(measure, model, n_tokens, method, options).result()
        row = rows[i, arm] = CalibrationRow(arm=arm, round=i, **machine.origin(model), **asdict(options), **spent)
        records.append(RESULTS, row)

    def median(arm, value, other="prefill"):
        """Over rounds, of a figure of the arm's row and of another arm's in the same round."""
        return statistics.median(value(rows[i, arm], rows[i, other]) for i in range(rounds))

    n_layers, n_taus = rows[0, "grid"].n_layers, len(arms["grid"].taus)
    trace = f"{rows[0, 'prefill'].n_sequences} x {n_tokens} tokens"
    seconds = median("prefill", lambda r, _: r.prefill_s)
    title = f"{model.name}, time as a multiple of one prefill"
    table = Table(title=f"{title}\n{trace}, prefill {seconds:.1f} s, -t {args.threads}, rounds: {rounds}")
    for heading in ("", f"tau {args.tau:g}", f"{n_taus} thresholds"):
        table.add_column(heading, justify="right" if heading else "left")

    def add(name, value, form="{:.2f}"):
        table.add_row(name, *(form.format(median(arm, value)) for arm in ("one", "grid")))

    add("choosing the windows", lambda r, p: r.choose_s / p.prefill_s)
    add("  of it runtime", lambda r, p: r.runtime_s / p.prefill_s)
    add("  of it replay", lambda r, p: r.replay_s / p.prefill_s)
    add("  of it the rest", lambda r, p: (r.choose_s - r.runtime_s - r.replay_s) / p.prefill_s)
    add("replay's share of choosing", lambda r, _: r.replay_s / r.choose_s, "{:.1%}")
    add("measuring the records on held-out text", lambda r, p: r.held_out_s / p.prefill_s)
    add("everything", lambda r, p: (r.choose_s + r.held_out_s) / p.prefill_s)
    table.add_section()
    times_one = median("grid", lambda grid, one: grid.choose_s / one.choose_s, "one")
    table.add_row("choosing, as a multiple of one threshold", "1.00", f"{times_one:.2f}")
    add(f"layers scored, of {n_layers} that take windows", lambda r, _: r.n_layers_scored, "{:g}")
    add("prefills if each of them began at the first layer", lambda r, _: r.prefills_from_start)
    Console(**({} if sys.stdout.isatty() else {"width": 120})).print(table)


if __name__ == "__main__":
    try:
        main()
    except HwkvError as error:
        sys.exit(f"error: {error}")
