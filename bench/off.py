"""Does the feature cost anything where it is not used?

The unpatched llama-bench and ours without a policy, at the same time, each on one CPU of its own with one thread, the
CPUs swapped every
round: whatever else slows the machine slows both. The figures are geometric means over pairs of swapped rounds, with
their standard error.

    python bench/off.py                20 pairs of rounds, SmolLM2-135M, about five minutes on two CPUs

Rows append to bench/results/off.jsonl, one per round and arm; each stands alone.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import OffRow
from hwkv_llamacpp.runtime import native

RESULTS = Path(__file__).parent / "results" / "off.jsonl"
N_PREFILL, N_DECODE = 512, 128
ARMS = ("upstream", "off")


def start(arm, model, cpu):
    """A llama-bench on one CPU."""
    command = [
        "taskset",
        "-c",
        str(cpu),
        str(native.binary("llama-bench", upstream=arm == "upstream")),
        "-m",
        str(model),
        "-p",
        str(N_PREFILL),
        "-n",
        str(N_DECODE),
        "-t",
        "1",
        "-fa",
        "1",
        "-r",
        "1",
        "-ngl",
        "0",
        "-o",
        "json",
    ]
    if arm == "off":
        command += ["--hwkv-policy", "off"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    """(prefill, decode) seconds per token."""
    out, err = process.communicate()
    if process.returncode != 0:
        sys.exit(f"error: {' '.join(process.args)} ended with {process.returncode}: {err[-500:]}")
    tests = json.loads(out)
    return tuple(1 / next(t for t in tests if t[key])["avg_ts"] for key in ("n_prompt", "n_gen"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of rounds (default: %(default)s)")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        sys.exit("error: two CPUs are needed")
    model = testmodels.smollm2()
    logs = ([], [])  # prefill, decode: log(off / upstream) of each round
    for i in tqdm(range(2 * args.pairs), desc="llama-bench", unit="round"):
        running = {arm: start(arm, model, cpus[(i + k) % 2]) for k, arm in enumerate(ARMS)}
        seconds = {arm: finish(process) for arm, process in running.items()}
        for arm, (prefill, decode) in seconds.items():
            row = OffRow(
                arm=arm,
                round=i,
                **machine.origin(model, upstream=arm == "upstream"),
                n_threads=1,
                n_prefill=N_PREFILL,
                n_decode=N_DECODE,
                type_kv="f16",
                flash_attn=True,
                prefill_s_per_token=prefill,
                decode_s_per_token=decode,
            )
            records.append(RESULTS, row)
        for log, off, upstream in zip(logs, seconds["off"], seconds["upstream"]):
            log.append(math.log(off / upstream))
    table = Table(title=f"{model.name}: time without a policy, as a multiple of unpatched llama.cpp's")
    for heading in ("", "ratio", "standard error"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, log in zip(("prefill", "decode"), logs):
        pairs = [(a + b) / 2 for a, b in zip(log[::2], log[1::2])]
        table.add_row(
            name,
            f"{math.exp(statistics.mean(pairs)):.4f}",
            f"{statistics.stdev(pairs) / math.sqrt(len(pairs)):.4f}" if len(pairs) > 1 else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
