"""How much each KV head matters: what next-token predictions lose when this head alone has a short window.

The error of a head's attention output says how far a window moves that output, not what the layers above make of it.
For small errors the
divergence of the predictions is quadratic in them, so its ratio to the squared error is a property of the head: its
sensitivity. It is measured once, under a window short enough to stand out from rounding, and turns the squared error
under any window into an expected divergence.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import HwkvError
from .files import KNOWN_KEYS, Count, Number, Vector
from .layerwise import START, Layerwise

PROBE = 32  # tokens: the window that the measured head gets


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Of the KV heads of one layer, each windowed alone. kl: [n_head_kv], nats. error: [n_head_kv], mean squared error
    of the output."""

    __pydantic_config__ = KNOWN_KEYS

    layer: Count
    kl: Vector
    error: Vector
    seconds: Number = 0.0  # that measuring took

    def __post_init__(self):
        if self.kl.shape != self.error.shape:
            raise HwkvError(
                f"kl and error have the shapes {self.kl.shape} and {self.error.shape}, one number per KV head expected"
            )

    @property
    def weights(self):
        """Divergence per squared error [n_head_kv]: the geometric mean of the head's own and its layer's, because one
        head's is noisy."""
        kl = np.maximum(self.kl, 0)  # one that is zero may be rounded to less
        own = np.divide(kl, self.error, out=np.zeros_like(kl), where=self.error > 0)
        layer = kl.sum() / self.error.sum() if self.error.sum() > 0 else 0.0
        return np.sqrt(own * layer)


def squared_errors(outputs):
    """Mean squared error against full history under each window [n_head_kv, n_window], over queries, the heads of a GQA
    group, and dimensions.

    outputs: as Layerwise.replay() returns them.
    """
    joined = (np.concatenate(traces, axis=1) for traces in outputs)
    return np.stack([np.square(out[:-1] - out[-1], dtype=np.float64).mean(axis=(1, 2, 3)) for out in joined])


def measure(model, layers, traces, samples, n_sink=0, wanted=None, n_positions=64, probe=PROBE):
    """Yields the Sensitivity of each of the wanted layers (None: all), from the first on. layers: all configurable ones
    of the model.

    traces, samples: as for Layerwise. The divergence is the mean over n_positions of each trace's second half. Costs
    about half a prefill of
    the traces for each KV head: what lies below its layer is computed once.
    """
    positions = [np.linspace(len(t) // 2, len(t) - 1, n_positions, dtype=int) for t in traces]
    with Layerwise(model, traces, samples) as layerwise:
        layerwise.run(START, layers[0].layer)
        full = None
        for layer, above in zip(layers, [*layers[1:], None]):
            if wanted is not None and layer not in wanted:
                if above:
                    layerwise.run(layer.layer, above.layer)
                continue
            error = squared_errors(layerwise.replay(layer, [probe], n_sink))[:, 0]
            here = layerwise.save()

            def log_probabilities(row):
                layerwise.set_windows(layer.layer, row, n_sink)
                at = layer
                if above:  # a run that went on would window the layers above, too
                    layerwise.run(layer.layer, above.layer)
                    layerwise.set_windows(above.layer, (None,) * above.n_head_kv)
                    at = above
                logits = layerwise.logits(at.layer, positions).astype(np.float64)
                layerwise.restore(here)
                return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)

            if full is None:
                full = log_probabilities((None,) * layer.n_head_kv)
            kl = [
                (
                    np.exp(full)
                    * (full - log_probabilities(tuple(probe if i == head else None for i in range(layer.n_head_kv))))
                )
                .sum(1)
                .mean()
                for head in range(layer.n_head_kv)
            ]
            yield Sensitivity(layer.layer, np.array(kl), error)
            layerwise.drop(here)
            if above:
                layerwise.set_windows(layer.layer, (None,) * layer.n_head_kv)
                layerwise.run(layer.layer, above.layer)
