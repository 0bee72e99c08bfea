"""SeqCalib: the windows of each layer are chosen with the lower layers already under theirs.

The method is that of HeadWiseKV (arXiv 2609.02029). For each threshold tau the configurable layers are taken in
execution order:

1. The trace runs through the real runtime up to the layer's attention, the layers below under the windows that were
   chosen for them.
2. Every candidate window is replayed on the captured queries.
3. Each KV head gets the shortest window whose mean score is at least tau.
4. The same run goes on under this row of windows.

Thresholds that chose the same rows so far share the work. Together they form a tree, which is walked depth first.

The scores of a layer become a file in the run folder when the runtime's attention was found to be what was replayed. A
calibration that was interrupted reads what is there and goes on. The rows follow from the files alone, so the result is
that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ...base.options import listed, threshold
from ...errors import HwkvError
from ...gguf.geometry import Layer, ModelGeometry
from ...policy.budget import Budget
from ..files import KNOWN_KEYS, Number, read, write
from ..layerwise import END, START, Layerwise, Outputs
from ..method import Method
from ..run import CalibrationRun, Record, check_replay, chosen
from ..scores import LayerScores, shortest_window
from ..selection import by_tau

Rows = tuple[tuple[int | None, ...], ...]  # windows of the lowest configurable layers, from the first on

TAUS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


@dataclass(frozen=True)
class SeqCalib(Method):
    """One record for each number of sinks and each threshold, in this order.

    taus: the thresholds, above 0 and up to 1. tau: the one that is selected, whatever the budget. HwkvError if they are
    not what they should be.
    """

    name = "seqcalib"
    help = (
        "The layers are taken from below, each with the lower ones already under their windows, and each KV head gets"
        " the shortest window under which its output on a trace stays as near to full history as a threshold asks."
        " There is one record per threshold."
    )

    taus: tuple[float, ...] = TAUS
    tau: float | None = None

    def __post_init__(self) -> None:
        for tau in self.taus:
            if not 0 < tau <= 1:
                raise HwkvError(f"tau is {tau}, a number above 0 and up to 1 expected")
        if not self.taus:
            raise HwkvError("no tau is given, at least one expected")
        if self.tau is not None and self.tau not in self.taus:
            known = ", ".join(f"{t:g}" for t in self.taus)
            raise HwkvError(f"tau {self.tau:g} is not calibrated; the thresholds are {known}")

    @classmethod
    def add_arguments(cls, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--taus",
            type=listed(threshold),
            metavar="T,...",
            help=f"thresholds (default: {','.join(f'{t:g}' for t in TAUS)})",
        )
        group.add_argument(
            "--tau",
            type=threshold,
            metavar="T",
            help="select the policy of this threshold, whatever it keeps; without --taus, the only one calibrated",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> SeqCalib:
        if args.tau is not None and (args.budget is not None or args.budget_bytes is not None):
            raise HwkvError("--tau selects by itself: it does not go with --budget or --budget-bytes")
        return cls(tuple(args.taus or ((args.tau,) if args.tau is not None else TAUS)), args.tau)

    def run(self, run: CalibrationRun) -> list[Record]:
        tree = _Tree(run, tuple(dict.fromkeys(self.taus)))
        rows = {n_sink: tree.rows(n_sink) for n_sink in run.sinks}
        return [tree.record(tau, n_sink, rows[n_sink][tau]) for n_sink in run.sinks for tau in tree.taus]

    def select(self, records: list[Record], geometry: ModelGeometry, budget: Budget) -> Record:
        return super().select(records, geometry, budget) if self.tau is None else by_tau(records, self.tau)


def file_name(layers: Sequence[Layer], n_sink: int, rows: Rows) -> str:
    """Name of the file with the scores of the layer above these rows. layers: all configurable ones."""
    key = hashlib.sha256(json.dumps([n_sink, rows]).encode()).hexdigest()[:16]
    return f"{layers[len(rows)].layer:03d}-{key}.json"


@dataclass(frozen=True)
class _ScoresFile:
    """What is kept of a layer under some rows below it."""

    __pydantic_config__ = KNOWN_KEYS

    scores: LayerScores
    seconds: Number  # that they took


class _Replayed(NamedTuple):
    """What was replayed of a layer, and what saves its scores."""

    outputs: Outputs
    save: Callable[[], None]


class _Tree:
    """The tree of thresholds of one run: those that chose the same rows so far are one branch."""

    def __init__(self, run: CalibrationRun, taus: tuple[float, ...]) -> None:
        self.run, self.taus, self.layers = run, taus, run.layers
        self.walker: _Walker | None = None  # made when a layer is not on disk

    def rows(self, n_sink: int) -> dict[float, Rows]:
        """{tau: rows of all configurable layers}."""
        self.n_sink = n_sink
        if self.walker:
            self.walker.restart(n_sink)
        leaves: dict[float, Rows] = {}
        taus = sorted(set(self.taus), reverse=True)
        with tqdm(
            total=len(taus) * len(self.layers),
            unit="layer",
            disable=not self.run.progress,
            desc=f"calibrate, n_sink {n_sink}",
        ) as bar:
            self._descend((), taus, leaves, bar)
        return leaves

    def _descend(self, rows: Rows, taus: list[float], leaves: dict[float, Rows], bar: tqdm) -> None:
        """Adds to leaves what the thresholds choose that have chosen these rows so far."""
        if len(rows) == len(self.layers):
            if self.walker:
                self.walker.confirm(rows)
            leaves.update((tau, rows) for tau in taus)
            return
        layer = self.layers[len(rows)]
        bar.set_postfix_str(f"layer {layer.layer}, tau {' '.join(f'{tau:g}' for tau in taus)}")
        scores, replayed = self._scores(rows)
        groups: dict[tuple[int | None, ...], list[float]] = {}
        for tau in taus:
            row = tuple(shortest_window(scores.mean[h], scores.windows, tau) for h in range(layer.n_head_kv))
            groups.setdefault(row, []).append(tau)
        bar.update(len(taus))
        walker = self.walker
        forked = len(groups) > 1 and walker is not None and walker.keep(rows)
        if walker and replayed:
            for row in groups:
                walker.expect(rows + (row,), chosen(replayed.outputs, row, scores.windows), replayed.save)
        del replayed  # large: the outputs under all windows
        for row, members in groups.items():
            self._descend(rows + (row,), members, leaves, bar)
        if walker and forked:
            walker.forget(rows)

    def _scores(self, rows: Rows) -> tuple[LayerScores, _Replayed | None]:
        """Scores of the layer above these rows, and what was replayed for them; None where they are on disk."""
        layer = self.layers[len(rows)]
        path = self.run.path(file_name(self.layers, self.n_sink, rows))
        if path.exists():
            return self._saved_scores(layer, self.n_sink, path)[0], None
        start = time.monotonic()
        if self.walker is None:
            self.walker = _Walker(self.run.layerwise(), self.layers, self.run.tolerance, self.n_sink)
        self.walker.go(rows)
        windows = self.run.windows[self.n_sink]
        outputs = self.walker.layerwise.replay(layer, windows, self.n_sink)
        scores = LayerScores.of(layer, windows, self.n_sink, outputs)
        file = _ScoresFile(scores, round(time.monotonic() - start, 3))
        # as a resumed run reads them, rounded: both choose the same windows
        return LayerScores.from_dict(scores.to_dict()), _Replayed(outputs, partial(write, path, file))

    def _saved_scores(self, layer: Layer, n_sink: int, path: Path) -> tuple[LayerScores, float]:
        """(LayerScores, seconds) of a layer's file."""

        def check(file):
            scores, windows = file.scores, self.run.windows[n_sink]
            found = scores.layer, scores.windows, len(scores.mean)
            if found != (layer.layer, tuple(windows), layer.n_head_kv):
                raise HwkvError(
                    f"scores of layer {scores.layer} with {len(scores.mean)} KV heads and windows"
                    f" {list(scores.windows)}; layer {layer.layer} with {layer.n_head_kv} and {windows} expected"
                )

        file = read(path, _ScoresFile, check)
        return file.scores, file.seconds

    def record(self, tau: float, n_sink: int, rows: Rows) -> Record:
        """The Record of a threshold, which chose these rows."""

        def cost() -> tuple[float, float]:
            score: list[float] = []
            seconds = 0.0
            for k, row in enumerate(rows):
                scores, spent = self._saved_scores(
                    self.layers[k], n_sink, self.run.path(file_name(self.layers, n_sink, rows[:k]))
                )
                score += [1.0 if w is None else scores.mean[h][scores.windows.index(w)] for h, w in enumerate(row)]
                seconds += spent
            return float(f"{np.mean(score):.7g}"), seconds

        return self.run.record(rows, n_sink, {"tau": tau}, cost)


class _Walker:
    """Brings the runtime to the attention of a layer, with given windows below it, in as few runs as it can."""

    def __init__(self, layerwise: Layerwise, layers: Sequence[Layer], tolerance: float, n_sink: int) -> None:
        self.layerwise, self.layers, self.tolerance = layerwise, layers, tolerance
        self.restart(n_sink)

    def restart(self, n_sink: int) -> None:
        """From here on with another number of sinks."""
        self.n_sink = n_sink
        self.at: Rows | None = None  # rows below the layer that the last run ended at
        self.kept: dict[Rows, int] = {}  # rows -> number of the saved state
        self.computed: dict[int, Rows] = {}  # depth -> rows under which K and V of that layer were computed
        # rows -> replayed output of the last of them, and what to call when the runtime's is the same
        self.expected: dict[Rows, tuple[npt.NDArray[np.float32], Callable[[], None]]] = {}

    def go(self, rows: Rows) -> None:
        """To the attention of the layer above these rows."""
        for depth in range(len(self._begin(rows)), len(rows)):
            layer, done = self.layers[depth], rows[: depth + 1]
            self.layerwise.set_windows(layer.layer, rows[depth], self.n_sink)
            self._run(layer.layer, self.layers[depth + 1].layer if depth + 1 < len(self.layers) else END, done)
            self._check(layer, done)

    def _begin(self, rows: Rows) -> Rows:
        """To the highest layer below that was reached under the same rows. Returns the rows below it."""
        if self.at == rows:
            return rows
        start = max(
            (
                known
                for known in (self.at, *self.kept)
                if known is not None and known == rows[: len(known)] and self.computed[len(known)] == known
            ),
            key=len,
            default=None,
        )
        if start is None:
            self._run(START, self.layers[0].layer, ())
            return ()
        if start != self.at:
            self.layerwise.restore(self.kept[start])
            self.at = start
        return start

    def confirm(self, rows: Rows) -> None:
        """Runs the last layer's attention under its row, too, only to compare it with the replay."""
        if rows in self.expected:
            self.go(rows)

    def keep(self, rows: Rows) -> bool:
        """Saves the state here, to come back to it. False if the run is elsewhere."""
        if self.at == rows:
            self.kept[rows] = self.layerwise.save()
        return self.at == rows

    def forget(self, rows: Rows) -> None:
        """Drops the state that keep() saved."""
        self.layerwise.drop(self.kept.pop(rows))

    def expect(self, rows: Rows, output: npt.NDArray[np.float32], agreed: Callable[[], None]) -> None:
        """The attention under the last of these rows gives this output, says the replay.

        agreed() is called when the runtime's is the same.
        """
        self.expected[rows] = output, agreed

    def _run(self, start: int, end: int, rows: Rows) -> None:
        self.layerwise.run(start, end)
        self.at = rows
        self.computed[len(rows)] = rows

    def _check(self, layer: Layer, rows: Rows) -> None:
        if rows not in self.expected:
            return
        expected, agreed = self.expected.pop(rows)
        check_replay(layer, expected, np.concatenate(self.layerwise.outputs(layer)), self.tolerance)
        agreed()
