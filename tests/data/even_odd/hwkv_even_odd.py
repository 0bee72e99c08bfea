"""Even layers get one window, odd layers the shortest one whose score is high enough."""

import time

import numpy as np

from hwkv_llamacpp.base import options
from hwkv_llamacpp.baselines.baseline import Baseline
from hwkv_llamacpp.baselines.rows import configurable, hand_made
from hwkv_llamacpp.calibration.layerwise import END, START
from hwkv_llamacpp.calibration.method import Method
from hwkv_llamacpp.calibration.run import check_replay, chosen
from hwkv_llamacpp.calibration.scores import LayerScores, shortest_window


class EvenOdd(Method):
    name = "even-odd"
    help = "Even layers get their shortest window, odd layers the shortest whose score is at least --least."

    def __init__(self, least=0.98):
        self.least = least

    @classmethod
    def add_arguments(cls, group):
        group.add_argument("--least", type=options.threshold, default=0.98, metavar="S", help="default: %(default)s")

    @classmethod
    def from_arguments(cls, args):
        return cls(args.least)

    def identity(self, trace):
        return {"least": self.least}

    def run(self, run):
        return [self.record(run, n_sink) for n_sink in run.sinks]

    def record(self, run, n_sink):
        start, rows, scores = time.monotonic(), [], []
        layerwise = run.layerwise()
        layerwise.run(START, run.layers[0].layer)  # the traces, up to the attention of the first layer
        for i, layer in enumerate(run.layers):
            windows = run.windows[n_sink]
            outputs = layerwise.replay(layer, windows, n_sink)  # what the layer gives under each window
            found = LayerScores.of(layer, windows, n_sink, outputs)
            if layer.layer % 2 == 0:
                row = (windows[0],) * layer.n_head_kv
            else:
                row = tuple(shortest_window(head, windows, self.least) for head in found.mean)
            layerwise.set_windows(layer.layer, row, n_sink)  # the layers above see it
            above = run.layers[i + 1].layer if i + 1 < len(run.layers) else END
            layerwise.run(layer.layer, above)
            check_replay(layer, chosen(outputs, row, windows), np.concatenate(layerwise.outputs(layer)), run.tolerance)
            rows.append(row)
            scores += [1.0 if w is None else found.mean[h][windows.index(w)] for h, w in enumerate(row)]
        cost = float(np.mean(scores)), time.monotonic() - start
        return run.record(rows, n_sink, {"least": self.least}, lambda: cost)


class Checkers(Baseline):
    name = "checkers"
    help = "every other KV head is full, the others get one window"
    example = "hwkv policy make checkers model.gguf --window 512 -o policy.json"

    @classmethod
    def add_arguments(cls, parser):
        parser.add_argument("--window", type=options.tokens, required=True, metavar="N")

    @classmethod
    def make(cls, geometry, args):
        rows = {
            layer.layer: [None if (layer.layer + head) % 2 else args.window for head in range(layer.n_head_kv)]
            for layer in configurable(geometry)
        }
        return hand_made(geometry, rows, {"method": cls.name, "window": args.window})
