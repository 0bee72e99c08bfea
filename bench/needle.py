"""Does a policy still find far facts, where a uniform window of the same size does not?

The mini hybrid answers prompts that state two facts and ask for one (bench/minilang.py), through the real llama-server:
with full KV, under a policy, and under the uniform window that keeps as many cells. Greedy, exact three digits, by how
far back the fact stands.

    python bench/needle.py                                    policies/mini-hybrid/seqcalib.json
    python bench/needle.py --policy other.json --prompts 5    quicker and rougher

Rows append to bench/results/needle.jsonl, one per arm and prompt length; each stands alone.
"""

import argparse
from pathlib import Path
from statistics import mean

from minilang import needle_prompt
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.baselines.budgets import largest
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import NeedleRow
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

MODEL = native.ROOT / "tests" / "data" / "mini-hybrid-f16.gguf"
POLICY = native.ROOT / "policies" / "mini-hybrid" / "seqcalib.json"
RESULTS = Path(__file__).parent / "results" / "needle.jsonl"
LENGTHS = {
    1024: (32, 64, 128, 256, 400, 700, 1000),
    2048: (32, 64, 128, 256, 700, 1000, 2000),
}  # prompt tokens: distances


def recall(policy, lengths=LENGTHS, n_prompts=20):
    """{prompt tokens: {distance: share of exact answers}} of the mini hybrid under a Policy, None for full KV."""
    path = "off"
    if policy is not None:
        path = native.ROOT / "build" / f"needle-{policy.fingerprint(8)}.json"
        policy.save(path)
    result = {}
    with LlamaServer(
        ServerOptions(
            model=MODEL,
            policy=path,
            n_ctx=4096,
            n_ubatch=64,
            n_parallel=1,
            n_threads=1,
            flash_attn="on",
            extra=("--cache-ram", "0", "--ctx-checkpoints", "0"),
        )
    ) as server:
        for n_tokens, distances in lengths.items():
            right = dict.fromkeys(distances, 0)
            cases = [(seed, distance) for distance in distances for seed in range(n_prompts)]
            for seed, distance in tqdm(cases, desc=f"{n_tokens} tokens", leave=False):
                prompt, answer = needle_prompt(1000 + seed, n_tokens, distance)
                reply = server.post(
                    "/completion", {"prompt": prompt, "n_predict": 3, "temperature": 0, "cache_prompt": False}
                )
                right[distance] += reply["content"].strip() == answer
            result[n_tokens] = {distance: n / n_prompts for distance, n in right.items()}
    return result


def same_size(geometry, policy, n_tokens):
    """The uniform policy that keeps as many cells as the policy at n_tokens, or a few less."""
    return largest(
        geometry, Budget(n_tokens, retention=policy.retention(n_tokens, geometry)), lambda w: uniform(geometry, w)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=POLICY, help="policy JSON (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per distance (default: %(default)s)")
    args = parser.parse_args()

    geometry = ModelGeometry.from_gguf(MODEL)
    policy = Policy.load(args.policy)
    longest = max(LENGTHS)
    uniform = same_size(geometry, policy, longest)
    window = next(iter(uniform.layers.values()))[0]
    tables = {}
    for n_tokens, distances in LENGTHS.items():
        tables[n_tokens] = Table(
            title=f"exact answers of the mini hybrid to prompts of {n_tokens} tokens, by distance of the fact"
        )
        for heading in ("", f"kept at {longest}", *map(str, distances), "all"):
            tables[n_tokens].add_column(heading, justify="right" if heading else "left")
    for name, arm in (("full KV", None), ("policy", policy), (f"one window of {window}", uniform)):
        found = recall(arm, n_prompts=args.prompts)
        retention = 1.0 if arm is None else arm.retention(longest, geometry)
        for n_tokens, shares in found.items():
            tables[n_tokens].add_row(
                name, f"{retention:.3f}", *(f"{share:.2f}" for share in shares.values()), f"{mean(shares.values()):.3f}"
            )
            row = NeedleRow(
                arm=name,
                **machine.origin(MODEL),
                policy_fingerprint=arm.fingerprint(geometry.n_layer) if arm else None,
                retention=round(retention, 6),
                n_prompt_tokens=n_tokens,
                prompts_per_distance=args.prompts,
                accuracy=mean(shares.values()),
                accuracy_by_distance=shares,
            )
            records.append(RESULTS, row)
    Console().print(*tables.values())


if __name__ == "__main__":
    main()
