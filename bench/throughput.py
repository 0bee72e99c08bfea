"""How fast are prefill and decode at the end of a filled context, as a share of upstream's?

    python bench/throughput.py                     SmolLM2-135M at 2K, 8K and 32K, three arms, three repetitions
    python bench/throughput.py --only qwen3.6-27b --model Qwen3.6-27B-Q4_K_M.gguf --policy policy.json  on a GPU

Rows append to bench/results/grid.jsonl, bench/memory.py's too: the cases are the same. A run that was stopped goes on.
`hwkv report bench/results/grid.jsonl -o DIR` makes the report.
"""

from grid import run

if __name__ == "__main__":
    run("throughput", __doc__)
