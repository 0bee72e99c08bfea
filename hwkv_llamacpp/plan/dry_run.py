"""llama.cpp's dry run: loads a model without its tensors' data, makes a context without memory, and tells what both
would take.

The context is made in a process of its own through the Python bindings, with the parameters that llama-server would
use: llama-fit-params assumes that every token of a micro-batch gives logits, which a server never asks for, and would
plan 100 MiB too much for a vocabulary of 49,152 at -ub 512. What the weights take on each device comes from
llama-fit-params, where that does not matter.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from gguf.constants import GGMLQuantizationType

from ..errors import HwkvError
from ..runtime import llama_log, native

MIB = 2**20
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
MAX_CTX = 2**25  # no model is trained for more; llama.cpp keeps 48 bytes for each cell even where it allocates no KV
SIZE = r"=\s+([\d.]+) MiB"


@dataclass(frozen=True)
class Context:
    """The parameters of a server that decide what it allocates, by llama.cpp's names."""

    model: str
    policy: str = "off"  # a file, "embedded" or "off"
    n_ctx: int = 0  # 0: the trained context
    n_batch: int = 2048
    n_ubatch: int = 512
    n_parallel: int = 1
    kv_unified: bool = False
    n_gpu_layers: int | None = None
    flash_attn: str = "on"
    type_k: str = "f16"
    type_v: str = "f16"


def run(context: Context) -> dict[str, Any]:
    """What the context would take, in bytes (MiB figures of llama.cpp's log where nothing exact is told):

        compute, output  {buffer type: bytes}
        caches           bytes of each KV cache, in the order made
        cache_devices    {layer: buffer type} of the layers with KV
        recurrent        bytes, and recurrent_devices as above
        resident         bytes of libraries, vocabulary and graphs, which the process holds beside its buffers
        hwkv             what llama-server tells at /props of a grouped cache; {"active": False} without one

    HwkvError with llama.cpp's reason where it refuses.
    """
    native.binary("llama-server")
    # a package that is not installed, only lies here, must be found as well
    environment = {
        **os.environ,
        "GGML_NO_BACKTRACE": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.dry_run", json.dumps(asdict(context))],
        text=True,
        errors="replace",
        capture_output=True,
        env=environment,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise HwkvError(f"{context.model}: llama.cpp's dry run ended with {done.returncode}: {last[:300]}") from None
    if "error" in answer:
        raise HwkvError(f"{context.model}: llama.cpp refuses: {answer['error'].rstrip('.')}")
    return answer


def weights(model: str, n_gpu_layers: int | None = None) -> dict[str, int]:
    """{device: bytes} of the weights, each to a MiB; "Host" is the machine's own memory."""
    command = [str(native.binary("llama-fit-params")), "-m", model, "-c", "256", "--hwkv-policy", "off", "-fitp", "on"]
    if n_gpu_layers is not None:
        command += ["-ngl", str(n_gpu_layers)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")} | {"GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, text=True, errors="replace", env=environment, capture_output=True)
    # device, model, context, compute in MiB; the log may end early, what is printed does not
    found = re.findall(r"^(\S+) (\d+) \d+ \d+\s*$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise HwkvError(f"{model}: llama-fit-params ended with {done.returncode}: {last[:300]}")
    return {name: int(mib) * MIB for name, mib in found}


def breakdown(log: str) -> dict[str, dict[str, int]]:
    """llama.cpp's memory breakdown, which the tools print at -lv 4: {device: {"model", "context", "compute"}}, whole
    MiB as bytes."""
    rows = re.findall(
        r"common_memory_breakdown_print: \|\s+- (\S+)[^|]*\|.*?\d+ =\s*(\d+) \+\s*(\d+) \+\s*(\d+)\b", log
    )
    return {
        name: {part: int(mib) * MIB for part, mib in zip(("model", "context", "compute"), parts)}
        for name, *parts in rows
    }


def buffers(log: str) -> dict[str, dict[str, int]]:
    """The same of a process that did not end cleanly, from what its log says of each buffer: {buffer type: as above},
    to 0.01 MiB."""
    parts = {"model": "model", "KV": "context", "RS": "context", "output": "context", "compute": "compute"}
    found: dict[str, dict[str, int]] = {}
    for name, part, mib in re.findall(rf"(\S+)\s+({'|'.join(parts)}) buffer size {SIZE}", log):
        sizes = found.setdefault(name, dict.fromkeys(("model", "context", "compute"), 0))
        sizes[parts[part]] += round(float(mib) * MIB)
    return found


def _child(context: Context) -> dict[str, Any]:
    """In the process of its own: makes model and context, and returns what `run` returns."""
    before = psutil.Process().memory_info().rss
    llama_cpp = native.load()
    from ..runtime.llama import override_value

    overrides = (llama_cpp.llama_model_kv_override * 2)()
    overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].key = b"hwkv.policy"
    value = override_value(context.policy, context.model).encode() + b"\0"
    ctypes.memmove(ctypes.addressof(overrides[0].value), value, len(value))
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    params.kv_overrides = overrides
    if context.n_gpu_layers is not None:
        params.n_gpu_layers = context.n_gpu_layers
    with llama_log.texts() as logged:
        model, ctx = llama_cpp.llama_model_load_from_file(os.fsencode(context.model), params), None
        if model:
            ctx = llama_cpp.llama_init_from_model(model, _context_params(context))
    if not ctx:
        return {"error": llama_log.reason(logged)}
    return {"hwkv": native.info(ctx), "resident": psutil.Process().memory_info().rss - before, **parse("".join(logged))}


def _context_params(context: Context) -> Any:
    llama_cpp = native.load()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context.n_ctx, context.n_batch, context.n_ubatch
    params.n_seq_max = params.n_outputs_max = context.n_parallel
    params.flash_attn_type = FLASH_ATTN[context.flash_attn]
    params.type_k, params.type_v = (
        GGMLQuantizationType[name.upper()].value for name in (context.type_k, context.type_v)
    )
    params.kv_unified = context.kv_unified
    params.swa_full = False
    return params


def parse(log: str) -> dict[str, Any]:
    """The figures in llama.cpp's log of a context being made, as `run` returns them."""

    def sums(pattern: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, mib in re.findall(pattern, log):
            found[name] = found.get(name, 0) + round(float(mib) * MIB)
        return found

    def devices(name: str) -> dict[int, str]:
        return {int(layer): device for layer, device in re.findall(rf"{name}[:,] layer\s+(\d+): dev = (\S+)", log)}

    # a context that is made in several tries logs each: the last counts
    start = log.rfind("llama_context: n_seq_max")
    log = log[max(start, 0) :]
    return {
        "compute": sums(rf"(\S+) compute buffer size {SIZE}"),
        "output": sums(rf"(\S+)\s+output buffer size {SIZE}"),
        "caches": [round(float(mib) * MIB) for mib in re.findall(rf"llama_kv_cache: size {SIZE}", log)],
        "cache_devices": devices("llama_kv_cache"),
        "recurrent": sum(round(float(mib) * MIB) for mib in re.findall(rf"llama_memory_recurrent: size {SIZE}", log)),
        "recurrent_devices": devices("llama_memory_recurrent"),
    }


if __name__ == "__main__":
    try:
        answer = _child(Context(**json.loads(sys.argv[1])))
    except HwkvError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the context has no memory to give back
