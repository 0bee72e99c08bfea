"""What does the runtime cost beside what it saves? Counted in instructions, which nothing else on the machine disturbs.

llama-bench under valgrind, one thread. A figure is the difference between two lengths of one run, per token: what
loading takes is in neither. The model has 3 MB, so that building graphs and masks weighs more than in any model of use.
Instructions are
not time: they show what is done more or less, not how long memory takes.

    python bench/instructions.py       six minutes on one CPU

Rows append to bench/results/instructions.jsonl.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import ModelGeometry
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.case import full_policy
from hwkv_llamacpp.measure.rows import InstructionsRow
from hwkv_llamacpp.runtime import native

MODEL = Path(__file__).resolve().parent.parent / "tests" / "data" / "mini-hybrid-f16.gguf"
RESULTS = Path(__file__).parent / "results" / "instructions.jsonl"
N_UBATCH = 64
WINDOWS = (None, 64, 256, 128)  # of the KV heads of a layer in turn, so that each is a cache of its own
CASES = {"prefill": (128, 256), "decode": (8, 24)}  # tokens of the shorter and the longer run


def policies(geometry, folder):
    """{arm: value of --hwkv-policy, or None for the unpatched llama-bench}."""
    row = pattern(
        geometry,
        by_layer={
            layer.layer: [WINDOWS[h % len(WINDOWS)] for h in range(layer.n_head_kv)] for layer in geometry.configurable
        },
    )
    made = {
        "all heads full": full_policy(geometry),
        "other windows for each head": row,
        "and 4 sinks": replace(row, n_sink=4),
    }
    found = {"upstream": None, "no policy": "off"}
    for name, policy in made.items():
        path = folder / f"{name}.json"
        policy.save(path)
        found[name] = path
    return found


def count(policy, phase, n):
    """Instructions of one llama-bench."""
    words = [
        native.binary("llama-bench", upstream=policy is None),
        "-m",
        MODEL,
        "-ub",
        N_UBATCH,
        "-fa",
        1,
        "-t",
        1,
        "-r",
        1,
        "-ngl",
        0,
        "--no-warmup",
        *(("-p", n, "-n", 0) if phase == "prefill" else ("-p", 0, "-n", n)),
        *(() if policy is None else ("--hwkv-policy", policy)),
    ]
    done = subprocess.run(
        ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *map(str, words)],
        text=True,
        capture_output=True,
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"error: {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def main():
    if not shutil.which("valgrind"):
        sys.exit("error: valgrind is needed: apt install valgrind")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        arms = policies(ModelGeometry.from_gguf(MODEL), Path(folder))
        for phase, arm in tqdm([(phase, arm) for phase in CASES for arm in arms], desc="llama-bench", unit="figure"):
            short, long = CASES[phase]
            found[phase, arm] = (count(arms[arm], phase, long) - count(arms[arm], phase, short)) / (long - short)
            row = InstructionsRow(
                arm=arm,
                **machine.origin(MODEL, upstream=arm == "upstream"),
                phase=phase,
                n_ubatch=N_UBATCH,
                n_threads=1,
                n_tokens=long - short,
                instructions_per_token=found[phase, arm],
            )
            records.append(RESULTS, row)
    table = Table(title=f"{MODEL.name}, -ub {N_UBATCH}: instructions per token")
    for heading in ("", "upstream, millions", *(f"{arm}, ratio" for arm in arms if arms[arm])):
        table.add_column(heading, justify="right" if heading else "left")
    for phase in CASES:
        base = found[phase, "upstream"]
        table.add_row(phase, f"{base / 1e6:.2f}", *(f"{found[phase, arm] / base:.4f}" for arm in arms if arms[arm]))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
