"""LeastKL: the windows with the least expected divergence within a budget.

SeqCalib asks the same of every KV head, however little the model's predictions depend on it. Here each head's squared
error under a window is weighted by the sensitivity that was measured for the head (sensitivity.py). The budget is spent
where it saves most (allocation.py). This is done three times: first with the errors that were seen under full history,
then twice with the errors under the policy so far. So the layers below have their windows, as in SeqCalib. Every budget
is met as nearly as the candidate windows allow.

The sensitivities of each layer, and the errors under each policy, are files in the run folder; an interrupted
calibration goes on from them.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from tqdm import tqdm

from ...base.options import count
from ...errors import HwkvError
from ...gguf.geometry import Layer, ModelGeometry
from ...policy.allocation import allocate
from ...policy.budget import Budget
from ..files import KNOWN_KEYS, Count, Number, Table, read, write
from ..layerwise import END, START
from ..method import Method
from ..run import ELSEWHERE, CalibrationRun, Record, RunFile, check_replay, chosen
from ..sensitivity import PROBE, Sensitivity, measure, squared_errors
from ..trace import Tokens, Trace, sample_positions

ByLayer = dict[int, npt.NDArray[np.float64]]  # {layer: array whose first axis is n_head_kv}
Rows = tuple[tuple[int | None, ...], ...]  # windows of all configurable layers

SHARES = (0.2, 0.3, 0.45, 0.6, 0.75)
N_PASSES = 2  # under the policy so far


@dataclass(frozen=True)
class LeastKL(Method):
    """One record for each budget and number of sinks.

    budgets: further ones. The budget that a run is asked for is always one of them, and so are SHARES of the cells at
    its context, to compare with. probe_tokens: of each trace sequence, to measure sensitivities on; None: all.
    """

    name = "leastkl"
    help = (
        "Measures how much each KV head matters to the model's predictions, and spends the budget where it saves most:"
        " slower than seqcalib, and better the less the budget keeps."
    )

    budgets: tuple[Budget, ...] = ()
    probe_tokens: int | None = None

    @classmethod
    def add_arguments(cls, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--probe-tokens",
            type=count,
            metavar="N",
            help="of each trace, to measure on; few are quick, but do not show what far tokens are for (default: all)",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "LeastKL":
        return cls(probe_tokens=args.probe_tokens)

    def probes(self, trace: Trace) -> list[Tokens]:
        """The token sequences that sensitivities are measured on. HwkvError if they are too short."""
        probes = [t[: self.probe_tokens] for t in trace.sequences]
        if len(probes[0]) <= 2 * PROBE:
            raise HwkvError(
                f"sensitivities are measured on {len(probes[0])} tokens of each trace, more than {2 * PROBE} expected"
            )
        return probes

    def identity(self, trace: Trace) -> dict[str, Any]:
        return {"probe_tokens": len(self.probes(trace)[0])}

    def run(self, run: CalibrationRun) -> list[Record]:
        budgets = self.budgets
        if run.budget:
            budgets += (*(Budget(run.budget.n_ctx, share) for share in SHARES), run.budget)
        spending = _Spending(run, self.probes(run.trace), tuple(dict.fromkeys(budgets)))
        return [spending.record(budget, n_sink) for n_sink in run.sinks for budget in spending.budgets]


def expected_losses(folder: str | Path, geometry: ModelGeometry, n_sink: int) -> tuple[list[int], ByLayer]:
    """What the run in a folder found that each KV head loses under each window, with all else full.

    Returns (candidate windows in tokens, {layer: expected divergence [n_head_kv, n_window], nats}). HwkvError if there
    is no such run, or not for this number of sinks.
    """
    layers, paths = geometry.configurable, _sensitivity_paths(folder, geometry.configurable, n_sink)
    path = _errors_path(folder, tuple((None,) * layer.n_head_kv for layer in layers), n_sink)
    for needed in (*paths, path):
        if not needed.exists():
            raise HwkvError(
                f"{folder}: no finished run of hwkv calibrate --method leastkl with --sink {n_sink}:"
                f" {needed.name} is missing"
            )
    made_for = read(Path(folder) / "run.json", RunFile, advice=ELSEWHERE).model_fingerprint
    if made_for != geometry.fingerprint:
        raise HwkvError(
            f"{folder}: a run of another model: its model_fingerprint is {made_for}, {geometry.fingerprint} expected"
            f" ({geometry.name})"
        )
    file = read(path, ErrorsFile, partial(_check_errors, layers=layers))
    held = [_sensitivity(path, layer) for layer, path in zip(layers, paths)]
    return file.windows, {found.layer: found.weights[:, None] * file.errors[found.layer] for found in held}


def _sensitivity_paths(folder: str | Path, layers: Sequence[Layer], n_sink: int) -> list[Path]:
    return [Path(folder) / "layers" / f"{layer.layer:03d}-sink{n_sink}-sensitivity.json" for layer in layers]


def _errors_path(folder: str | Path, rows: Rows, n_sink: int) -> Path:
    key = hashlib.sha256(json.dumps([n_sink, rows]).encode()).hexdigest()[:16]
    return Path(folder) / "layers" / f"errors-{key}.json"


def _sensitivity(path: Path, layer: Layer) -> Sensitivity:
    """The Sensitivity of a Layer in a file."""

    def check(found: Sensitivity) -> None:
        if (found.layer, len(found.kl)) != (layer.layer, layer.n_head_kv):
            raise HwkvError(
                f"{len(found.kl)} KV heads of layer {found.layer}; {layer.n_head_kv} of layer {layer.layer} expected"
            )

    return read(path, Sensitivity, check)


@dataclass(frozen=True)
class ErrorsFile:
    """What a walk through the layers gave: {layer: mean squared error of each KV head's output under each candidate
    window [n_head_kv, n_window]}."""

    __pydantic_config__ = KNOWN_KEYS

    windows: list[Count]
    errors: dict[Annotated[int, Field(ge=0)], Table]
    seconds: Number  # that it took


def _check_errors(file: "ErrorsFile", layers: Sequence[Layer], windows: list[int] | None = None) -> None:
    """windows: the candidates that are wanted; None: whatever there are."""
    if windows is not None and file.windows != windows:
        raise HwkvError(f"errors under the windows {file.windows}, {windows} expected")
    for layer in layers:
        if layer.layer not in file.errors:
            raise HwkvError(f"key 'errors.{layer.layer}' is missing")
        shape, wanted = file.errors[layer.layer].shape, (layer.n_head_kv, len(file.windows))
        if shape != wanted:
            raise HwkvError(f"errors of layer {layer.layer} have the shape {shape}, {wanted} expected")


class _Spending:
    """One run: what is measured once, and spent under every budget."""

    def __init__(self, run: CalibrationRun, probe_traces: list[Tokens], budgets: tuple[Budget, ...]) -> None:
        self.run, self.layers, self.probe_traces, self.budgets = run, run.layers, probe_traces, budgets
        # a budget that cannot be met is better refused before hours of work than after
        for n_sink, windows in run.windows.items():
            nothing = {layer.layer: np.zeros((layer.n_head_kv, len(windows))) for layer in self.layers}
            for budget in budgets:
                allocate(run.geometry, windows, nothing, n_sink, budget)

    def record(self, budget: Budget, n_sink: int) -> Record:
        """The Record of a Budget."""
        rows: Rows = tuple((None,) * layer.n_head_kv for layer in self.layers)
        seconds = self.weights(n_sink)[1]
        for _ in range(1 + N_PASSES):
            losses, spent = self.losses(rows, n_sink)
            seconds += spent
            policy = allocate(self.run.geometry, self.run.windows[n_sink], losses, n_sink, budget)
            rows = tuple(policy.row(layer) for layer in self.layers)
        setting = {"budget": budget.describe()}
        return self.run.record(rows, n_sink, setting, lambda: (None, seconds), name=budget.name)

    def losses(self, rows: Rows, n_sink: int) -> tuple[ByLayer, float]:
        """({layer: expected divergence of each KV head under each candidate window [n_head_kv, n_window]}, seconds).

        The layers below are under these rows.
        """
        weights, (errors, seconds) = self.weights(n_sink)[0], self.errors(rows, n_sink)
        return {layer.layer: weights[layer.layer][:, None] * errors[layer.layer] for layer in self.layers}, seconds

    def weights(self, n_sink: int) -> tuple[ByLayer, float]:
        """({layer: divergence per squared error [n_head_kv]}, seconds)."""
        paths = dict(zip(self.layers, _sensitivity_paths(self.run.folder, self.layers, n_sink)))
        missing = [layer for layer, path in paths.items() if not path.exists()]
        if missing:
            self.run.release()
            samples = sample_positions(self.probe_traces, self.run.settings.n_queries, self.run.settings.seed)
            start = time.monotonic()
            with tqdm(
                total=sum(layer.n_head_kv for layer in missing),
                unit="head",
                disable=not self.run.progress,
                desc=f"sensitivities, n_sink {n_sink}",
            ) as bar:
                for layer, found in zip(
                    missing, measure(self.run.model, self.layers, self.probe_traces, samples, n_sink, missing)
                ):
                    now = time.monotonic()
                    write(paths[layer], replace(found, seconds=round(now - start, 3)))
                    start = now
                    bar.update(len(found.kl))
        held = [_sensitivity(path, layer) for layer, path in paths.items()]
        return {found.layer: found.weights for found in held}, sum(found.seconds for found in held)

    def errors(self, rows: Rows, n_sink: int) -> tuple[ByLayer, float]:
        """({layer: mean squared error of each KV head's output under each window [n_head_kv, n_window]}, seconds).

        The layers below are under these rows.
        """
        path = _errors_path(self.run.folder, rows, n_sink)
        if not path.exists():
            start = time.monotonic()
            found = {layer.layer: error for layer, error in self._walk(rows, n_sink)}
            write(path, ErrorsFile(self.run.windows[n_sink], found, round(time.monotonic() - start, 3)))
        wanted = partial(_check_errors, layers=self.layers, windows=self.run.windows[n_sink])
        file = read(path, ErrorsFile, wanted)
        return file.errors, file.seconds

    def _walk(self, rows: Rows, n_sink: int) -> Iterator[tuple[Layer, npt.NDArray[np.float64]]]:
        """Yields (layer, errors) from the first layer on, each computed once, under these rows."""
        layerwise = self.run.layerwise()
        layerwise.run(START, self.layers[0].layer)
        for layer, above, row in tqdm(
            list(zip(self.layers, [*self.layers[1:], None], rows)),
            unit="layer",
            disable=not self.run.progress,
            desc=f"errors, n_sink {n_sink}",
            leave=False,
        ):
            outputs = layerwise.replay(layer, self.run.windows[n_sink], n_sink)
            error = squared_errors(outputs)
            if not np.isfinite(error).all():
                raise HwkvError(
                    f"layer {layer.layer}: the attention output on the trace holds values that are no numbers,"
                    " so no window can be judged"
                )
            layerwise.set_windows(layer.layer, row, n_sink)
            layerwise.run(layer.layer, above.layer if above else END)
            check_replay(
                layer,
                chosen(outputs, row, self.run.windows[n_sink]),
                np.concatenate(layerwise.outputs(layer)),
                self.run.tolerance,
            )
            yield layer, error
