"""SeqCalib: the windows of each layer are chosen with the lower layers already under theirs (HeadWiseKV, arXiv 2609.02029).

For each threshold tau the configurable layers are taken in execution order. The trace runs through the real runtime up to the layer's
attention, the layers below under the windows chosen for them; every candidate window is replayed on the captured queries; each KV head
gets the shortest window whose mean score is at least tau; and the same run goes on under this row. Thresholds that chose the same rows
so far share the work: together they form a tree, walked depth first.

Each layer that was scored, and whose replay was found to be what the runtime attends, is a file in the run folder. A calibration that was
interrupted reads what is there and goes on; the rows follow from the files alone, so the result is that of an undisturbed run.
"""

import hashlib
import json
import time
from functools import partial

import numpy as np
from tqdm import tqdm

from ...errors import HwkvError
from ..layerwise import END, START, Layerwise
from ..run import CalibrationRun, Settings, check_replay, chosen, read, write
from ..scores import LayerScores, shortest_window, stabilised_cosine


def calibrate(model, geometry, trace, folder, settings=Settings(), *, lengths=(), model_sha256=None, progress=True):
    """Records of all thresholds and numbers of sinks, in the order of settings.sinks and then of settings.taus.

    model: a runtime.Model; geometry: its ModelGeometry; trace: a trace.Trace; folder: where the run keeps its files.
    lengths: token counts at which retention is recorded, besides the trace's own.
    HwkvError if the folder holds another calibration, or if a replayed attention output is not the runtime's.
    """
    with _Run(model, geometry, trace, folder, settings, model_sha256, progress) as run:
        sinks, taus = dict.fromkeys(settings.sinks), dict.fromkeys(settings.taus)  # each once
        rows = {n_sink: run.rows(n_sink) for n_sink in sinks}
        lengths = sorted({*lengths, len(trace.sequences[0])})
        return [run.of_tau(tau, n_sink, rows[n_sink][tau], lengths) for n_sink in sinks for tau in taus]


class _Run(CalibrationRun):
    def __init__(self, model, geometry, trace, folder, settings, model_sha256, progress):
        self.walker, self.progress = None, progress
        super().__init__("seqcalib", model, geometry, trace, folder, settings, model_sha256)

    def release(self):
        if self.walker:
            self.walker.close()
            self.walker = None

    # the tree of thresholds

    def rows(self, n_sink):
        """{tau: rows of all configurable layers}."""
        self.n_sink = n_sink
        if self.walker:
            self.walker.restart(n_sink)
        leaves = {}
        taus = sorted(set(self.settings.taus), reverse=True)
        with tqdm(
            total=len(taus) * len(self.layers),
            unit="layer",
            disable=not self.progress,
            desc=f"calibrate, n_sink {n_sink}",
        ) as bar:
            self._descend((), taus, leaves, bar)
        return leaves

    def _descend(self, rows, taus, leaves, bar):
        if len(rows) == len(self.layers):
            if self.walker:
                self.walker.confirm(rows)
            leaves.update((tau, rows) for tau in taus)
            return
        layer = self.layers[len(rows)]
        bar.set_postfix_str(f"layer {layer.layer}, tau {' '.join(f'{tau:g}' for tau in taus)}")
        scores, outputs, save = self._scores(rows)
        groups = {}
        for tau in taus:
            groups.setdefault(
                tuple(shortest_window(scores.mean[h], scores.windows, tau) for h in range(layer.n_head_kv)), []
            ).append(tau)
        bar.update(len(taus))
        forked = len(groups) > 1 and self.walker and self.walker.keep(rows)
        if outputs is not None:
            for row in groups:
                self.walker.expect(rows + (row,), chosen(outputs, row, scores.windows), save)
            del outputs  # of all windows: the layers above have their own
        for row, members in groups.items():
            self._descend(rows + (row,), members, leaves, bar)
        if forked:
            self.walker.forget(rows)

    def _layer_file(self, n_sink, rows):
        key = hashlib.sha256(json.dumps([n_sink, rows]).encode()).hexdigest()[:16]
        return self.folder / "layers" / f"{self.layers[len(rows)].layer:03d}-{key}.json"

    def _scores(self, rows):
        """(LayerScores of the layer above these rows, its replayed outputs, a call that saves the scores; None twice where they are on disk)."""
        layer = self.layers[len(rows)]
        path = self._layer_file(self.n_sink, rows)
        if path.exists():
            return self._saved_scores(layer, self.n_sink, path)[0], None, None
        start = time.monotonic()
        if self.walker is None:
            self.walker = _Walker(
                Layerwise(self.model, list(self.trace.sequences), self.samples),
                self.layers,
                self.tolerance,
                self.n_sink,
            )
        self.walker.go(rows)
        windows = self.windows[self.n_sink]
        outputs = self.walker.layerwise.replay(layer, windows, self.n_sink)
        cosines = [np.concatenate([stabilised_cosine(out) for out in traces]) for traces in outputs]
        scores = LayerScores.from_cosines(layer.layer, windows, self.n_sink, cosines)
        if not np.isfinite(scores.mean).all():
            raise HwkvError(
                f"layer {layer.layer}: the attention output on the trace holds values that are no numbers, so no window can be judged"
            )
        text = json.dumps({"scores": scores.to_dict(), "seconds": round(time.monotonic() - start, 3)}) + "\n"
        return (
            LayerScores.from_dict(scores.to_dict()),
            outputs,
            partial(write, path, text),
        )  # the scores as a resumed run reads them

    def _saved_scores(self, layer, n_sink, path):
        """(LayerScores, seconds) of a layer's file."""

        def parse(data):
            scores, seconds = LayerScores.from_dict(data["scores"]), float(data["seconds"])
            if (scores.layer, scores.windows, len(scores.mean)) != (
                layer.layer,
                tuple(self.windows[n_sink]),
                layer.n_head_kv,
            ):
                raise HwkvError(
                    f"scores of layer {scores.layer} with {len(scores.mean)} KV heads and windows {list(scores.windows)}; layer"
                    f" {layer.layer} with {layer.n_head_kv} and {self.windows[n_sink]} expected"
                )
            return scores, seconds

        return read(path, parse)

    def of_tau(self, tau, n_sink, rows, lengths):
        """The Record of a threshold."""

        def cost():
            score, seconds = [], 0.0
            for k, row in enumerate(rows):
                scores, spent = self._saved_scores(self.layers[k], n_sink, self._layer_file(n_sink, rows[:k]))
                score += [1.0 if w is None else scores.mean[h][scores.windows.index(w)] for h, w in enumerate(row)]
                seconds += spent
            return float(f"{np.mean(score):.7g}"), seconds

        return self.record(rows, n_sink, lengths, cost, tau=tau)


class _Walker:
    """Brings the runtime to the attention of a layer, with given windows below it, in as few runs as it can."""

    def __init__(self, layerwise, layers, tolerance, n_sink):
        self.layerwise, self.layers, self.tolerance = layerwise, layers, tolerance
        self.restart(n_sink)

    def restart(self, n_sink):
        """From here on with another number of sinks."""
        self.n_sink = n_sink
        self.at = None  # rows below the layer that the last run ended at
        self.kept = {}  # rows -> number of the saved state
        self.computed = {}  # depth -> rows under which the K and V in the cache of that layer were computed
        self.expected = {}  # rows -> replayed output of the last of them, and what to call when the runtime's is the same

    def close(self):
        self.layerwise.close()

    def go(self, rows):
        """To the attention of the layer above these rows."""
        if self.at != rows:
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
            elif start != self.at:
                self.layerwise.restore(self.kept[start])
                self.at = start
        while len(self.at) < len(rows):
            depth = len(self.at)
            layer, row = self.layers[depth], rows[depth]
            self.layerwise.set_windows(layer.layer, row, self.n_sink)
            self._run(
                layer.layer, self.layers[depth + 1].layer if depth + 1 < len(self.layers) else END, rows[: depth + 1]
            )
            self._check(layer, rows[: depth + 1])

    def confirm(self, rows):
        """Runs the last layer's attention under its row too, only to compare it with the replay."""
        if rows in self.expected:
            self.go(rows)

    def keep(self, rows):
        """Saves the state here, to come back to it. False if the run is elsewhere."""
        if self.at == rows:
            self.kept[rows] = self.layerwise.save()
        return self.at == rows

    def forget(self, rows):
        self.layerwise.drop(self.kept.pop(rows))

    def expect(self, rows, output, agreed):
        """What the attention of the last of these rows gives, by the replay; agreed() is called when the runtime's is the same."""
        self.expected[rows] = output, agreed

    def _run(self, start, end, rows):
        self.layerwise.run(start, end)
        self.at = rows
        self.computed[len(rows)] = rows

    def _check(self, layer, rows):
        if rows not in self.expected:
            return
        expected, agreed = self.expected.pop(rows)
        check_replay(layer, expected, np.concatenate(self.layerwise.outputs(layer)), self.tolerance)
        agreed()
