"""What does the runtime cost beside what it saves? Counted in instructions, which nothing else on the machine disturbs.

llama-bench under valgrind, one thread. A figure is the difference between two lengths of one run, per token: what loading takes is in
neither. On a model of 3 MB, where building graphs and masks weighs most, and on SmolLM2-135M, where arithmetic does. Instructions are not time:
they show what is done more or less, not how long memory takes.

    python bench/instructions.py                  the mini hybrid, ten minutes on one CPU
    python bench/instructions.py --only smollm2   half an hour

Rows append to bench/results/instructions.jsonl.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import ModelGeometry, digest, handmade, machine, native, testmodels
from hwkv_llamacpp.measure import full_policy

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "instructions.jsonl"
N_UBATCH = 64
WINDOWS = (None, 64, 256, 128)  # of the KV heads of a layer in turn, so that each is a cache of its own


@dataclass(frozen=True)
class Subject:
    """A model, and (phase, depth, shorter, longer) of what is counted, in tokens."""

    path: object
    cases: tuple


SUBJECTS = {
    "mini-hybrid": Subject(lambda: ROOT / "tests" / "data" / "mini-hybrid-f16.gguf",
                           tuple((phase, depth, *lengths) for phase, lengths in (("prefill", (128, 256)), ("decode", (8, 24))) for depth in (0, 384))),
    "smollm2": Subject(testmodels.smollm2, (("prefill", 0, 64, 128), ("decode", 0, 4, 12), ("decode", 320, 4, 12))),
}


def policies(geometry, folder):
    """{arm: value of --hwkv-policy, or None for the unpatched llama-bench}."""
    row = handmade.pattern(geometry, by_layer={layer.layer: [WINDOWS[h % len(WINDOWS)] for h in range(layer.n_head_kv)] for layer in geometry.configurable})
    made = {"all heads full": full_policy(geometry), "other windows for each head": row, "and 4 sinks": replace(row, n_sink=4)}
    found = {"upstream": None, "no policy": "off"}
    for name, policy in made.items():
        path = folder / f"{name}.json"
        policy.save(path)
        found[name] = path
    return found


def count(model, policy, phase, depth, n):
    """Instructions of one llama-bench."""
    words = [native.binary("llama-bench", upstream=policy is None), "-m", model, "-d", depth, "-ub", N_UBATCH, "-fa", 1, "-t", 1, "-r", 1, "-ngl", 0, "--no-warmup",
             *(("-p", n, "-n", 0) if phase == "prefill" else ("-p", 0, "-n", n)), *(() if policy is None else ("--hwkv-policy", policy))]
    done = subprocess.run(["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *map(str, words)], text=True, capture_output=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"error: {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUBJECTS, default="mini-hybrid", metavar="NAME", help=f"{', '.join(SUBJECTS)} (default: %(default)s)")
    args = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("error: valgrind is needed: apt install valgrind")
    subject = SUBJECTS[args.only]
    model, found = subject.path(), {}
    about = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commit": machine.commit(), "builds": machine.build_pair(),
             "model": model.name, "model_sha256": digest.of_model(model), "n_ubatch": N_UBATCH, "n_threads": 1}
    with tempfile.TemporaryDirectory() as folder, open(RESULTS, "a") as rows:
        arms = policies(ModelGeometry.from_gguf(model), Path(folder))
        for case, arm in tqdm([(case, arm) for case in subject.cases for arm in arms], desc="llama-bench", unit="figure"):
            phase, depth, short, long = case
            found[case, arm] = (count(model, arms[arm], phase, depth, long) - count(model, arms[arm], phase, depth, short)) / (long - short)
            rows.write(json.dumps({**about, "arm": arm, "phase": phase, "depth": depth, "n_tokens": long - short, "instructions_per_token": found[case, arm]}) + "\n")
            rows.flush()
    table = Table(title=f"{model.name}, -ub {N_UBATCH}: instructions per token")
    for heading in ("", "upstream, millions", *(f"{arm}, ratio" for arm in arms if arms[arm])):
        table.add_column(heading, justify="right" if heading else "left")
    for case in subject.cases:
        base = found[case, "upstream"]
        table.add_row(f"{case[0]} at depth {case[1]}", f"{base / 1e6:.2f}", *(f"{found[case, arm] / base:.4f}" for arm in arms if arms[arm]))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
