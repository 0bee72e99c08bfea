"""How much each KV head matters: what next-token predictions lose when this head alone has a short window.

The error of a head's attention output says how far a window moves that output. It does not say what the layers above
make of it. For small errors the divergence of the predictions is quadratic in the error. So the ratio of divergence to
squared error is a property of the head: its sensitivity. It is measured once, under a window so short that the
divergence stands out from rounding. Times the squared error under any window it gives an expected divergence.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import Layer
from ..runtime.context import Model
from .files import KNOWN_KEYS, Count, Number, Vector
from .layerwise import START, Layerwise, Outputs
from .trace import Tokens

PROBE = 32  # tokens: the window that the measured head gets


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What was measured of the KV heads of one layer, each windowed alone.

    kl: [n_head_kv], nats. error: [n_head_kv], mean squared error of the attention output.
    """

    __pydantic_config__ = KNOWN_KEYS

    layer: Count
    kl: Vector
    error: Vector
    seconds: Number = 0.0  # that measuring took

    def __post_init__(self) -> None:
        if self.kl.shape != self.error.shape:
            raise HwkvError(
                f"kl and error have the shapes {self.kl.shape} and {self.error.shape}, one number per KV head expected"
            )

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """Divergence per squared error [n_head_kv].

        One head's is noisy: taken is the geometric mean of the head's own and that of its layer.
        """
        kl = np.maximum(self.kl, 0)  # rounding may make a divergence of zero negative
        own = np.divide(kl, self.error, out=np.zeros_like(kl), where=self.error > 0)
        layer = kl.sum() / self.error.sum() if self.error.sum() > 0 else 0.0
        return np.sqrt(own * layer)


def squared_errors(outputs: Outputs) -> npt.NDArray[np.float64]:
    """Mean squared error against full history under each window [n_head_kv, n_window].

    The mean is over queries, the query heads of a GQA group, and dimensions. outputs: of Layerwise.replay().
    """
    joined = (np.concatenate(traces, axis=1) for traces in outputs)
    return np.stack([np.square(out[:-1] - out[-1], dtype=np.float64).mean(axis=(1, 2, 3)) for out in joined])


def measure(
    model: Model,
    layers: Sequence[Layer],
    traces: Sequence[Tokens],
    samples: Sequence[npt.NDArray[np.integer]],
    n_sink: int = 0,
    wanted: Container[Layer] | None = None,
    n_positions: int = 64,
    probe: int = PROBE,
) -> Iterator[Sensitivity]:
    """Yields the Sensitivity of each of the wanted layers (None: all), from the first on.

    layers: all configurable ones of the model. traces, samples: as for Layerwise. probe: window of the measured head,
    in tokens. The divergence is the mean over n_positions of each trace's second half. Costs about half a prefill of
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
            kl = []
            for head in range(layer.n_head_kv):
                if full is None:
                    all_full = (None,) * layer.n_head_kv
                    full = _log_probabilities(layerwise, here, layer, above, all_full, n_sink, positions)
                row = [probe if i == head else None for i in range(layer.n_head_kv)]
                lost = full - _log_probabilities(layerwise, here, layer, above, row, n_sink, positions)
                kl.append((np.exp(full) * lost).sum(1).mean())
                del lost  # as large as the logits
            yield Sensitivity(layer.layer, np.array(kl), error)
            layerwise.drop(here)
            if above:
                layerwise.set_windows(layer.layer, (None,) * layer.n_head_kv)
                layerwise.run(layer.layer, above.layer)


def _log_probabilities(
    layerwise: Layerwise,
    here: int,
    layer: Layer,
    above: Layer | None,
    row: WindowRow,
    n_sink: int,
    positions: Sequence[npt.NDArray[np.integer]],
) -> npt.NDArray[np.float64]:
    """Of the next tokens at the positions [all positions, n_vocab], with the row of windows in the layer.

    The run is at the attention of the layer, and comes back to it: here is the number of the state there. above: the
    next configurable layer. All layers above are full.
    """
    layerwise.set_windows(layer.layer, row, n_sink)
    at = layer
    if above:  # a run from the layer to the end would window the layers above, too
        layerwise.run(layer.layer, above.layer)
        layerwise.set_windows(above.layer, (None,) * above.n_head_kv)
        at = above
    logits = layerwise.logits(at.layer, positions).astype(np.float64)
    layerwise.restore(here)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
