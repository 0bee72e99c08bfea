"""LeastKL: the windows with the least expected divergence within a budget.

SeqCalib asks the same of every KV head, however little the model's predictions depend on it. Here each head's squared error under a window
is weighted by the sensitivity that was measured for the head (sensitivity.py), and the budget is spent where it saves most (allocation.py):
first with the errors seen under full history, then twice more with the errors seen under the policy so far, which plays the part of
SeqCalib's deployed prefix. Every budget is met as nearly as the candidate windows allow.

The sensitivities of each layer, and the errors under each policy, are files in the run folder; an interrupted calibration goes on from them.
"""

import hashlib
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...errors import HwkvError
from ...policy.allocation import allocate
from ..layerwise import END, START, Layerwise
from ..run import CalibrationRun, check_replay, chosen, read, write
from ..sensitivity import PROBE, Sensitivity, measure, squared_errors
from ..trace import sample_positions

SHARES = (0.2, 0.3, 0.45, 0.6, 0.75)
N_PASSES = 2  # under the policy so far


def calibrate(model, geometry, trace, folder, settings, *, lengths=(), model_sha256=None, progress=True):
    """Records of settings.budgets, each for every number of sinks. Arguments and errors as seqcalib.calibrate()."""
    with _Run(model, geometry, trace, folder, settings, model_sha256, progress) as run:
        lengths = sorted({*lengths, len(trace.sequences[0])})
        return [
            run.of_budget(budget, n_sink, lengths)
            for n_sink in dict.fromkeys(settings.sinks)
            for budget in dict.fromkeys(settings.budgets)
        ]


def expected_losses(folder, geometry, n_sink):
    """What the run in a folder measured with all else full: (candidate windows, {layer: expected divergence for each KV head under each of them
    [n_head_kv, n_window]}). HwkvError if there is no such run, or not for this number of sinks."""
    layers, paths = geometry.configurable, _sensitivity_paths(folder, geometry.configurable, n_sink)
    path = _errors_path(folder, tuple((None,) * layer.n_head_kv for layer in layers), n_sink)
    for needed in (*paths, path):
        if not needed.exists():
            raise HwkvError(
                f"{folder}: no finished run of hwkv calibrate --method leastkl with --sink {n_sink}: {needed.name} is missing"
            )
    made_for = read(Path(folder) / "run.json", lambda data: data["model_fingerprint"])
    if made_for != geometry.fingerprint:
        raise HwkvError(
            f"{folder}: a run of another model: its model_fingerprint is {made_for}, {geometry.fingerprint} expected ({geometry.name})"
        )
    windows = read(path, lambda data: data["windows"])
    errors = read(path, lambda data: _errors(data, layers, windows))[0]
    held = {layer.layer: read(p, lambda data: _sensitivity(data, layer))[0] for layer, p in zip(layers, paths)}
    return windows, {il: held[il].weights[:, None] * errors[il] for il in held}


def _sensitivity_paths(folder, layers, n_sink):
    return [Path(folder) / "layers" / f"{layer.layer:03d}-sink{n_sink}-sensitivity.json" for layer in layers]


def _errors_path(folder, rows, n_sink):
    key = hashlib.sha256(json.dumps([n_sink, rows]).encode()).hexdigest()[:16]
    return Path(folder) / "layers" / f"errors-{key}.json"


def _sensitivity(data, layer):
    seconds = float(data.pop("seconds"))
    found = Sensitivity.from_dict(data)
    if (found.layer, len(found.kl)) != (layer.layer, layer.n_head_kv):
        raise HwkvError(
            f"{len(found.kl)} KV heads of layer {found.layer}; {layer.n_head_kv} of layer {layer.layer} expected"
        )
    return found, seconds


def _errors(data, layers, windows):
    errors = {layer.layer: np.array(data["errors"][str(layer.layer)], dtype=np.float64) for layer in layers}
    if data["windows"] != windows:
        raise HwkvError(f"errors under the windows {data['windows']}, {windows} expected")
    for layer in layers:
        if errors[layer.layer].shape != (layer.n_head_kv, len(windows)):
            raise HwkvError(
                f"errors of layer {layer.layer} have the shape {errors[layer.layer].shape},"
                f" ({layer.n_head_kv}, {len(windows)}) expected"
            )
    return errors, float(data["seconds"])


class _Run(CalibrationRun):
    def __init__(self, model, geometry, trace, folder, settings, model_sha256, progress):
        self.layerwise, self.progress = None, progress
        self.probe_traces = [t[: settings.probe_tokens] for t in trace.sequences]
        if len(self.probe_traces[0]) <= 2 * PROBE:
            raise HwkvError(
                f"sensitivities are measured on {len(self.probe_traces[0])} tokens of each trace, more than {2 * PROBE} expected"
            )
        super().__init__(
            "leastkl",
            model,
            geometry,
            trace,
            folder,
            settings,
            model_sha256,
            {"probe_tokens": len(self.probe_traces[0])},
        )
        for n_sink, windows in self.windows.items():  # said before hours of work, not after
            nothing = {layer.layer: np.zeros((layer.n_head_kv, len(windows))) for layer in self.layers}
            for budget in settings.budgets:
                allocate(geometry, windows, nothing, n_sink, budget)

    def release(self):
        if self.layerwise:
            self.layerwise.close()
            self.layerwise = None

    def of_budget(self, budget, n_sink, lengths):
        """The Record of a Budget."""
        rows, seconds = tuple((None,) * layer.n_head_kv for layer in self.layers), self.weights(n_sink)[1]
        for _ in range(1 + N_PASSES):
            losses, spent = self.losses(rows, n_sink)
            seconds += spent
            policy = allocate(self.geometry, self.windows[n_sink], losses, n_sink, budget)
            rows = tuple(policy.row(layer) for layer in self.layers)
        return self.record(rows, n_sink, lengths, lambda: (None, seconds), budget=budget)

    def losses(self, rows, n_sink):
        """({layer: expected divergence for each KV head under each candidate window [n_head_kv, n_window]}, seconds), the layers below under
        these rows."""
        weights, (errors, seconds) = self.weights(n_sink)[0], self.errors(rows, n_sink)
        return {layer.layer: weights[layer.layer][:, None] * errors[layer.layer] for layer in self.layers}, seconds

    def weights(self, n_sink):
        """({layer: divergence per squared error [n_head_kv]}, seconds)."""
        paths = dict(zip(self.layers, _sensitivity_paths(self.folder, self.layers, n_sink)))
        missing = [layer for layer, path in paths.items() if not path.exists()]
        if missing:
            self.release()
            samples = sample_positions(self.probe_traces, self.settings.n_queries, self.settings.seed)
            start = time.monotonic()
            with tqdm(
                total=sum(layer.n_head_kv for layer in missing),
                unit="head",
                disable=not self.progress,
                desc=f"sensitivities, n_sink {n_sink}",
            ) as bar:
                for layer, found in zip(
                    missing, measure(self.model, self.layers, self.probe_traces, samples, n_sink, missing)
                ):
                    now = time.monotonic()
                    write(paths[layer], json.dumps({**found.to_dict(), "seconds": round(now - start, 3)}) + "\n")
                    start = now
                    bar.update(len(found.kl))
        held = [read(path, partial(_sensitivity, layer=layer)) for layer, path in paths.items()]
        return {found.layer: found.weights for found, _ in held}, sum(seconds for _, seconds in held)

    def errors(self, rows, n_sink):
        """({layer: mean squared error of each KV head's output under each candidate window [n_head_kv, n_window]}, seconds), the layers
        below under these rows."""
        path = _errors_path(self.folder, rows, n_sink)
        if not path.exists():
            start = time.monotonic()
            found = {layer.layer: error.tolist() for layer, error in self._walk(rows, n_sink)}
            write(
                path,
                json.dumps(
                    {"windows": self.windows[n_sink], "errors": found, "seconds": round(time.monotonic() - start, 3)}
                )
                + "\n",
            )
        return read(path, partial(_errors, layers=self.layers, windows=self.windows[n_sink]))

    def _walk(self, rows, n_sink):
        """Yields (layer, errors) from the first layer on, each computed once, under these rows."""
        if self.layerwise is None:
            self.layerwise = Layerwise(self.model, list(self.trace.sequences), self.samples)
        layerwise = self.layerwise
        layerwise.run(START, self.layers[0].layer)
        for layer, above, row in tqdm(
            list(zip(self.layers, [*self.layers[1:], None], rows)),
            unit="layer",
            disable=not self.progress,
            desc=f"errors, n_sink {n_sink}",
            leave=False,
        ):
            outputs = layerwise.replay(layer, self.windows[n_sink], n_sink)
            error = squared_errors(outputs)
            if not np.isfinite(error).all():
                raise HwkvError(
                    f"layer {layer.layer}: the attention output on the trace holds values that are no numbers, so no window can be judged"
                )
            layerwise.set_windows(layer.layer, row, n_sink)
            layerwise.run(layer.layer, above.layer if above else END)
            check_replay(
                layer,
                chosen(outputs, row, self.windows[n_sink]),
                np.concatenate(layerwise.outputs(layer)),
                self.tolerance,
            )
            yield layer, error
