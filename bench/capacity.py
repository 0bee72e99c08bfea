"""What is the largest context that a memory holds, with full KV and under a policy?

    python bench/capacity.py                       SmolLM2-135M under a memory limit of the kernel
    python bench/capacity.py --only qwen3.6-27b --model Qwen3.6-27B-Q4_K_M.gguf --policy policy.json    the GPU's own
    memory

Rows append to bench/results/capacity.jsonl; a run that was stopped goes on. `hwkv report bench/results/capacity.jsonl
-o DIR` makes the report.
"""

from grid import run

if __name__ == "__main__":
    run("capacity", __doc__)
