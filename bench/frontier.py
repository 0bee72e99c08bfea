"""How much quality does each way of keeping less KV cost?

    python bench/frontier.py                     the mini hybrid
    python bench/frontier.py --only smollm2      two or three hours on two cores; --only gemma3 takes less

Full KV, one window for all heads, StreamingLLM, DuoAttention's form, random windows, SeqCalib without and with sink
tokens, LeastKL; and what users do today, q8_0 and q4_0 K/V, alone and together with LeastKL. KL against full F16 KV on
held-out text, over the bytes that the runtime allocates for one sequence of the text's length.

Rows append to bench/results/frontier.jsonl; the calibrations are kept in build/frontier. Stopped, the same command goes
on. The picture is bench/results/frontier-NAME.png.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.baselines.budgets import largest
from hwkv_llamacpp.baselines.duo import duo
from hwkv_llamacpp.baselines.random import random_windows
from hwkv_llamacpp.baselines.streaming import streaming
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.calibration import trace as traces
from hwkv_llamacpp.calibration.distortion import DistortionMeter
from hwkv_llamacpp.calibration.methods.leastkl import LeastKL, expected_losses
from hwkv_llamacpp.calibration.methods.seqcalib import SeqCalib
from hwkv_llamacpp.calibration.run import Settings
from hwkv_llamacpp.gguf import digest, testmodels
from hwkv_llamacpp.measure import machine, records
from hwkv_llamacpp.measure.rows import FrontierRow
from hwkv_llamacpp.plot import figures
from hwkv_llamacpp.plot.heatmap import INK
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.policy.footprint import predict
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
SINKS = 4
N_UBATCH = 64  # each window allocates a micro-batch more than it keeps
COMPARED, AT_KL = (
    ("SeqCalib", f"SeqCalib, {SINKS} sinks", f"LeastKL, {SINKS} sinks"),
    0.015,
)  # what they keep at this KL

COLORS = {
    "one window": "#b9c2cc",
    f"StreamingLLM, {SINKS} sinks": "#8a96a3",
    f"random, {SINKS} sinks": "#c9b458",
    f"DuoAttention's form, {SINKS} sinks": "#45aab0",
    "SeqCalib": "#7a5ba6",
    f"SeqCalib, {SINKS} sinks": "#2f73a8",
    f"LeastKL, {SINKS} sinks": "#d9822b",
    "q8_0 K/V": "#5a8f29",
    "q8_0 K/V and LeastKL": "#5a8f29",
    "q4_0 K/V": "#b33a3a",
    "q4_0 K/V and LeastKL": "#b33a3a",
}


@dataclass(frozen=True)
class Subject:
    """A model and how it is calibrated."""

    path: object  # a path, or a function that fetches one
    n_tokens: int  # of each trace and held-out text
    windows: tuple  # and the first SINKS tokens, where there are sinks
    taus: dict  # n_sink: thresholds
    text: Path | None = None  # None: the default trace
    shares: tuple = (0.3, 0.4, 0.5, 0.6)  # of the cells, for LeastKL
    others: tuple = (0.3, 0.6)  # for what it is compared with, and for LeastKL together with quantised K and V
    n_queries: int = 128
    probe_tokens: int | None = None


SUBJECTS = {
    "mini-hybrid": Subject(
        ROOT / "tests" / "data" / "mini-hybrid-f16.gguf",
        2048,
        (64, 128, 256, 512, 1024),
        {0: (0.97, 0.98, 0.985, 0.99, 0.994, 0.996), SINKS: (0.97, 0.98, 0.985, 0.99, 0.994, 0.996)},
        ROOT / "policies" / "mini-hybrid" / "trace.txt",
        (0.2, 0.3, 0.4, 0.5, 0.6, 0.75),
        (0.2, 0.3, 0.4, 0.5, 0.6, 0.75),
        512,
    ),
    "smollm2": Subject(
        testmodels.smollm2,
        4096,
        (64, 128, 256, 512, 1024, 2048),
        {0: (0.9, 0.95, 0.98, 0.99, 0.995), SINKS: (0.95, 0.97, 0.98, 0.99, 0.995)},
        shares=(0.2, 0.3, 0.4, 0.5),
        probe_tokens=512,
    ),
    # three KV heads in all: there is little to choose from, and without sinks every head is full from a threshold of
    # 0.9 on
    "gemma3": Subject(
        testmodels.gemma3,
        4096,
        (64, 128, 256, 512, 1024, 2048),
        {0: (0.6, 0.8), SINKS: (0.9, 0.95, 0.98, 0.99)},
        shares=(0.2, 0.3, 0.5, 0.7),
        others=(0.3, 0.5),
    ),
}


@dataclass(frozen=True)
class Arm:
    """One point of the picture. distortion: of the policy, where its calibration has measured it."""

    name: str
    setting: str
    policy: Policy
    type_kv: str = "f16"
    distortion: dict | None = None


def calibrated(name, subject, model, geometry, trace):
    """(arms of SeqCalib without and with sinks, arms of LeastKL, expected losses under one window and sinks)."""
    folder = native.ROOT / "build" / "frontier" / name
    thresholds, length = [], subject.n_tokens

    def settings(n_sink):
        return Settings((n_sink,), tuple(w - n_sink for w in subject.windows), subject.n_queries)

    for n_sink, taus in subject.taus.items():
        found = SeqCalib(taus).calibrate(model, geometry, trace, folder / f"seqcalib-{n_sink}", settings(n_sink))
        sinks = f", {n_sink} sinks" * (n_sink > 0)
        thresholds += [Arm(f"SeqCalib{sinks}", r.label, r.policy, distortion=r.distortion) for r in found]
    method = LeastKL(tuple(Budget(length, share) for share in subject.shares), subject.probe_tokens)
    found = method.calibrate(model, geometry, trace, folder / "leastkl", settings(SINKS))
    ours = [Arm(f"LeastKL, {SINKS} sinks", r.label, r.policy, distortion=r.distortion) for r in found]
    return thresholds, ours, expected_losses(folder / "leastkl", geometry, SINKS)[1]


def arms(name, subject, model, geometry, trace):
    """All arms of a model."""
    thresholds, ours, losses = calibrated(name, subject, model, geometry, trace)
    full = Policy({layer.layer: (None,) * layer.n_head_kv for layer in geometry.configurable})
    result = [Arm("full KV", "", full), *thresholds, *ours]
    stream = subject.windows[0] - SINKS
    at_stream = {il: rows[:, 0] for il, rows in losses.items()}
    for share in subject.others:
        budget, setting = Budget(subject.n_tokens, share), f"keep {share:g}"
        result += [
            Arm("one window", setting, largest(geometry, budget, lambda w: uniform(geometry, w))),
            Arm(
                f"StreamingLLM, {SINKS} sinks",
                setting,
                largest(geometry, budget, lambda w: streaming(geometry, w, SINKS)),
            ),
            Arm(f"DuoAttention's form, {SINKS} sinks", setting, duo(geometry, at_stream, stream, budget, SINKS)),
            Arm(
                f"random, {SINKS} sinks",
                setting,
                random_windows(
                    geometry, [w - SINKS for w in subject.windows] + [None], seed=0, n_sink=SINKS, budget=budget
                ),
            ),
        ]
    for type_kv in ("q8_0", "q4_0"):
        result.append(Arm(f"{type_kv} K/V", "", full, type_kv))
        together = {f"keep {share:g}" for share in subject.others}
        result += [
            Arm(f"{type_kv} K/V and LeastKL", arm.setting, arm.policy, type_kv)
            for arm in ours
            if arm.setting in together
        ]
    return result


def measure(name, subject, n_threads):
    """Rows of a model, those on disk included."""
    path = subject.path() if callable(subject.path) else subject.path
    geometry, sha256 = ModelGeometry.from_gguf(path), digest.of_model(path)
    results, rows = RESULTS / "frontier.jsonl", []
    options = RuntimeOptions(n_ubatch=N_UBATCH, n_threads=n_threads)
    with Model(path, options) as model:
        trace = (
            traces.from_files(model, [subject.text], subject.n_tokens)
            if subject.text
            else traces.default(model, subject.n_tokens)
        )
        held = {
            (r.arm, r.setting, r.policy_fingerprint): r
            for r in records.read(results, missing_ok=True)
            if (r.model_sha256, r.held_out_sha256) == (sha256, trace.held_out_sha256)
        }
        todo = arms(name, subject, model, geometry, trace)
        with DistortionMeter(model, trace.held_out) as meter:
            for arm in tqdm(todo, desc=f"{name}, KL", unit="arm"):
                fingerprint = arm.policy.fingerprint(geometry.n_layer)
                row = held.get((arm.name, arm.setting, fingerprint))
                if row is None:
                    distortion = arm.distortion
                    if distortion is None:
                        with Model(path, replace(options, type_k=arm.type_kv, type_v=arm.type_kv)) as other:
                            distortion = meter.measure(arm.policy, other).to_dict()
                    bytes_ = predict(
                        geometry,
                        arm.policy,
                        subject.n_tokens,
                        n_ubatch=N_UBATCH,
                        type_k=arm.type_kv,
                        type_v=arm.type_kv,
                    ).kv_bytes
                    row = FrontierRow(
                        arm=arm.name,
                        **machine.origin(path),
                        setting=arm.setting,
                        policy_fingerprint=fingerprint,
                        n_sink=arm.policy.n_sink,
                        type_kv=arm.type_kv,
                        retention=round(arm.policy.retention(subject.n_tokens, geometry), 6),
                        kv_bytes=bytes_,
                        text=subject.text.name if subject.text else "default",
                        held_out_sha256=trace.held_out_sha256,
                        n_ubatch=N_UBATCH,
                        **{**distortion, "n_tokens": subject.n_tokens},
                    )
                    records.append(results, row)
                rows.append(row)
    return rows


def print_table(name, rows):
    table = Table(title=f"{name}: {rows[0].n_tokens} tokens, text {rows[0].text}, -ub {N_UBATCH}")
    for heading in ("", "asked", "cells kept", "KV, MiB", "KL", "top-1"):
        table.add_column(heading, justify="right" if heading else "left")
    for r in rows:
        table.add_row(
            r.arm, r.setting, f"{r.retention:.3f}", f"{r.kv_bytes / 2**20:.2f}", f"{r.kl:.5f}", f"{r.top1:.3f}"
        )
    Console(width=120).print(table)
    kept = {name: at_kl(rows, name) for name in COMPARED}
    if all(kept.values()):
        first, second, third = kept.values()
        print(
            f"At a KL of {AT_KL}: "
            + ", ".join(f"{name} {share:.3f}" for name, share in kept.items())
            + f" of the cells; {second / first:.2f} of the first, and {third / second:.2f} of that again"
        )


def at_kl(rows, name):
    """Share of cells that an arm keeps at AT_KL, between its points on a line in log KL; None where no two points lie
    around it."""
    points = sorted((r.retention, r.kl) for r in rows if r.arm == name and r.type_kv == "f16")
    for (r0, k0), (r1, k1) in zip(points, points[1:]):
        if k0 >= AT_KL >= k1 > 0:
            return r0 + (r1 - r0) * math.log(k0 / AT_KL) / math.log(k0 / k1)
    return None


def plot(name, rows):
    """KL over allocated bytes, an arm a line."""
    figure, axes = figures.chart(8.5, 5)
    for arm, color in COLORS.items():
        points = sorted((r.kv_bytes / 2**20, r.kl) for r in rows if r.arm == arm and r.kl > 0)
        ours = "LeastKL" in arm
        if not points:
            continue
        axes.plot(
            *zip(*points),
            marker="D" if "K/V" in arm else "o",
            color=color,
            label=arm,
            markersize=5,
            linewidth=2.4 if ours else 1.4,
            markerfacecolor="white" if arm.endswith("K/V") else color,
            zorder=3 if ours else 2,
            linestyle="none" if len(points) == 1 else "--" if "K/V" in arm else "-",
        )
    full = next(r for r in rows if r.arm == "full KV")
    axes.axvline(full.kv_bytes / 2**20, color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        "full KV, F16",
        (full.kv_bytes / 2**20, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color=INK,
    )
    axes.set(xscale="log", yscale="log", ylabel="KL against full F16 KV, nats")
    axes.set_xlabel(f"KV bytes allocated for {rows[0].n_tokens:,} tokens, MiB", fontsize=9, color=INK)
    axes.set_title(rows[0].model, fontsize=9, color=INK)
    axes.tick_params(which="minor", length=0, labelsize=8, labelcolor=INK)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(RESULTS / f"frontier-{name}.png", dpi=130, facecolor="white")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        action="append",
        choices=SUBJECTS,
        metavar="NAME",
        help=f"{', '.join(SUBJECTS)} (default: mini-hybrid)",
    )
    parser.add_argument(
        "-t", "--threads", type=int, metavar="N", help="CPU threads (default: 1 for the mini hybrid, else all)"
    )
    args = parser.parse_args()
    for name in args.only or ["mini-hybrid"]:
        rows = measure(name, SUBJECTS[name], args.threads or (1 if name == "mini-hybrid" else None))
        print_table(name, rows)
        plot(name, rows)


if __name__ == "__main__":
    main()
