"""What does the grouped cache cost, and what does it save, in time?

Three arms of the same source and flags, interleaved so that a slow minute of the machine hits all of them alike:

    upstream   the unpatched llama-bench
    off        ours without a policy
    policy     ours with half of the KV heads at a window (in each layer another half)

Each round runs every arm once, in an order that rotates; the figures are medians over rounds of ratios within a round.
An empty cache takes little time, so it gets four rounds for each at the depth. The attention part of decoding is the
time of a token at a depth less that at depth 0. Its ideal is the share of cells
that is attended: windows of 512 keep 512 cells, their rings attend a few more (the ubatch that writes, and padding).

    python bench/speed.py                          SmolLM2-135M, depth 8192
    python bench/speed.py --depth 2048 --rounds 3  quicker and rougher

Rows append to bench/results/speed.jsonl, one per round and arm; each stands alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import SpeedRow
from hwkv_llamacpp.policy.footprint import predict
from hwkv_llamacpp.runtime import native

RESULTS = Path(__file__).parent / "results" / "speed.jsonl"
N_PREFILL, N_DECODE, N_UBATCH = 512, 32, 512


def half_windowed(geometry, window):
    """Every other KV head gets the window, counted through all layers: neighbouring heads and layers differ."""
    rows, i = {}, 0
    for layer in geometry.configurable:
        rows[layer.layer] = tuple(window if (i + head) % 2 else None for head in range(layer.n_head_kv))
        i += layer.n_head_kv
    return Policy(rows)


def bench(arm, model, policy, depth, n_threads, cpus):
    """One run of llama-bench: [prefill seconds per token, decode seconds per token] at the depth."""
    program = native.binary("llama-bench", upstream=arm == "upstream")
    command = [
        str(program),
        "-m",
        str(model),
        "-p",
        str(N_PREFILL),
        "-n",
        str(N_DECODE),
        "-d",
        str(depth),
        "-t",
        str(n_threads),
        "-ub",
        str(N_UBATCH),
        "-fa",
        "1",
        "-r",
        "1",
        "-ngl",
        "0",
        "-o",
        "json",
    ]
    if arm != "upstream":
        command += ["--hwkv-policy", str(policy) if arm == "policy" else "off"]
    if cpus:
        command = ["taskset", "-c", cpus, *command]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    tests = json.loads(done.stdout)
    prefill, decode = (next(t for t in tests if t[key]) for key in ("n_prompt", "n_gen"))
    return 1 / prefill["avg_ts"], 1 / decode["avg_ts"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="GGUF to measure (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--window", type=int, default=512, help="window of half of the KV heads (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8192, help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="threads (default: %(default)s)")
    parser.add_argument("--cpus", help="pin to these CPUs, such as 0-1 (taskset)")
    args = parser.parse_args()

    model = args.model or testmodels.smollm2()
    geometry = ModelGeometry.from_gguf(model)
    policy = half_windowed(geometry, args.window)
    policy_path = native.ROOT / "build" / "bench-speed-policy.json"
    policy_path.unlink(missing_ok=True)
    policy.save(policy_path)

    arms = ["upstream", "off", "policy"]
    seconds = {}  # (round, arm, depth) -> (prefill, decode) seconds per token
    n_rounds = {0: 4 * args.rounds, args.depth: args.rounds}
    runs = [(i, arms[(i + k) % 3], depth) for depth, n in n_rounds.items() for i in range(n) for k in range(3)]
    runs.sort(key=lambda run: run[0] / n_rounds[run[2]])  # spread over the whole time alike
    for i, arm, depth in tqdm(runs, desc="llama-bench", unit="run"):
        prefill, decode = seconds[i, arm, depth] = bench(arm, model, policy_path, depth, args.threads, args.cpus)
        row = SpeedRow(
            arm=arm,
            round=i,
            **machine.origin(model, upstream=arm == "upstream"),
            policy_fingerprint=policy.fingerprint(geometry.n_layer),
            window=args.window,
            depth=depth,
            n_threads=args.threads,
            n_prefill=N_PREFILL,
            n_decode=N_DECODE,
            n_ubatch=N_UBATCH,
            type_kv="f16",
            flash_attn=True,
            prefill_s_per_token=prefill,
            decode_s_per_token=decode,
        )
        records.append(RESULTS, row)

    def ratio(value, arm, depth):
        """Median over rounds of value(arm) / value(upstream)."""
        return statistics.median(value(i, arm, depth) / value(i, "upstream", depth) for i in range(n_rounds[depth]))

    def prefill(i, arm, depth):
        return seconds[i, arm, depth][0]

    def decode(i, arm, depth):
        return seconds[i, arm, depth][1]

    def attention(i, arm, depth):
        return decode(i, arm, depth) - statistics.median(decode(k, arm, 0) for k in range(n_rounds[0]))

    table = Table(title=f"{model.name}, time as a multiple of upstream's (less is faster), {args.rounds} rounds")
    for heading in ("", "off", "policy"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, value, depth in (
        ("prefill, empty cache", prefill, 0),
        ("decode, empty cache", decode, 0),
        (f"prefill at depth {args.depth}", prefill, args.depth),
        (f"decode at depth {args.depth}", decode, args.depth),
        ("attention part of decode", attention, args.depth),
    ):
        table.add_row(name, *[f"{ratio(value, arm, depth):.3f}" for arm in arms[1:]])
    n_ctx = args.depth + max(N_PREFILL, N_DECODE)
    shape = predict(geometry, policy, n_ctx, n_ubatch=N_UBATCH)
    table.add_row("KV cells kept, by the policy", "1.000", f"{policy.retention(args.depth, geometry):.3f}")
    table.add_row(
        "KV bytes allocated",
        "1.000",
        f"{shape.kv_bytes / predict(geometry, None, n_ctx, n_ubatch=N_UBATCH).kv_bytes:.3f}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
