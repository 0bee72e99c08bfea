"""How much memory does a server take at its peak, and is that what was predicted?

    python bench/memory.py                         SmolLM2-135M at 2K, 8K and 32K, three arms, three repetitions
    python bench/memory.py --only gemma3 -r 1
    python bench/memory.py --only qwen3.6-27b --model Qwen3.6-27B-Q4_K_M.gguf --policy policy.json      on a GPU

Rows append to bench/results/grid.jsonl, bench/throughput.py's too: the cases are the same. A run that was stopped goes
on. `hwkv report bench/results/grid.jsonl -o DIR` makes the report.
"""

from grid import run

if __name__ == "__main__":
    run("memory", __doc__)
