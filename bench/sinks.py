"""Do sink tokens cost time?

One process holds three caches: a calibrated policy with its four sink tokens; the same cells without sinks, which are
windows that much longer; and that one again, which shows what the measurement resolves. All take the same steps, a
micro-batch of prefill or a token of decode, in turns that rotate, so that whatever slows the machine slows all alike.
Figures are geometric means over steps of the ratios within a step, with their standard error, from where on every
window is full.

    python bench/sinks.py              SmolLM2-135M, 4,096 tokens of prefill, 256 of decode: two minutes on two CPUs

Rows append to bench/results/sinks.jsonl, one per arm and phase, with all times; each stands alone.
"""

import argparse
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import Policy
from hwkv_llamacpp.calibration import trace as traces
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import SinksRow
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "sinks.jsonl"
POLICY = ROOT / "policies" / "SmolLM2-135M-Instruct" / "seqcalib.json"
BASE, ARMS = "without", ("without", "without again", "with")


def without_sinks(policy):
    """A Policy of as many cells: windows longer by the sinks that are left out."""
    return Policy({il: tuple(w and w + policy.n_sink for w in row) for il, row in policy.layers.items()})


def steps(contexts, tokens, n_prefill, n_ubatch):
    """Yields (phase, position, {arm: seconds}). Every context takes each step; the order rotates."""
    arms, pos = list(contexts), 0
    while pos < len(tokens):
        phase, n = ("prefill", n_ubatch) if pos < n_prefill else ("decode", 1)
        wanted, seconds = np.zeros(n, dtype=bool), {}
        wanted[-1] = phase == "decode"
        for arm in arms:
            start = time.perf_counter()
            contexts[arm].decode(tokens[pos : pos + n], pos, wanted)
            native.load().llama_synchronize(contexts[arm].handle)
            seconds[arm] = time.perf_counter() - start
        yield phase, pos, seconds
        arms = arms[1:] + arms[:1]
        pos += n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prefill", type=int, default=4096, metavar="N", help="tokens of prefill (default: %(default)s)"
    )
    parser.add_argument("--decode", type=int, default=256, metavar="N", help="tokens of decode (default: %(default)s)")
    parser.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        default=64,
        metavar="N",
        help="tokens of a step of prefill (default: %(default)s)",
    )
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: all CPUs)")
    args = parser.parse_args()
    n_prefill = args.prefill // args.ubatch_size * args.ubatch_size
    path, policy = testmodels.smollm2(), Policy.load(POLICY)
    policies = dict(zip(ARMS, (without_sinks(policy), without_sinks(policy), policy)))
    longest = max(w for row in policies[BASE].layers.values() for w in row if w)
    seconds = {phase: {arm: [] for arm in ARMS} for phase in ("prefill", "decode")}
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, RuntimeOptions(n_ubatch=args.ubatch_size, n_threads=args.threads)))
        n_ctx = n_prefill + args.decode
        tokens = traces.default(model, n_ctx).sequences[0]
        contexts = {arm: stack.enter_context(model.context(policies[arm], n_ctx)) for arm in ARMS}
        with tqdm(total=n_ctx, unit="tok", desc="steps") as bar:
            for phase, pos, taken in steps(contexts, tokens, n_prefill, args.ubatch_size):
                bar.update(args.ubatch_size if phase == "prefill" else 1)
                if pos >= longest:
                    for arm, value in taken.items():
                        seconds[phase][arm].append(value)

    table = Table(title=f"{path.name}: time of a step, as a multiple of that without sinks")
    for heading in ("", *(f"{phase}, {text}" for phase in seconds for text in ("ratio", "standard error"))):
        table.add_column(heading, justify="right" if heading else "left")
    cells = {arm: [] for arm in ARMS if arm != BASE}
    origin = machine.origin(path)
    for phase, by_arm in seconds.items():
        for arm, values in by_arm.items():
            row = SinksRow(
                arm=arm,
                **origin,
                policy=POLICY.name,
                n_sink=policies[arm].n_sink,
                phase=phase,
                n_prefill=n_prefill,
                n_decode=args.decode,
                n_ubatch=args.ubatch_size,
                n_threads=args.threads,
                n_first=longest,
                seconds=[round(v, 6) for v in values],
            )
            records.append(RESULTS, row)
            if arm != BASE:
                logs = [math.log(a / b) for a, b in zip(values, by_arm[BASE])]
                cells[arm] += [
                    f"{math.exp(statistics.mean(logs)):.4f}",
                    f"{statistics.stdev(logs) / math.sqrt(len(logs)):.4f}",
                ]
    for label, row in zip(("without sinks, once more", f"with {policy.n_sink} sinks"), cells.values()):
        table.add_row(label, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
