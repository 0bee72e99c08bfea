"""Scores: how near a KV head's output under a window stays to its output with full history. Higher keeps more; full is
1.

The mean over the query heads of a GQA group, which share their KV head's window, is taken here and only here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.formats import parse
from ..errors import HwkvError
from ..gguf.geometry import Layer
from .files import KNOWN_KEYS, Count, ShortTable, to_data
from .layerwise import Outputs

EPS = 1e-6
STATISTICS = {
    "mean": lambda x: x.mean(0),
    "p1": lambda x: np.percentile(x, 1, axis=0),
    "p5": lambda x: np.percentile(x, 5, axis=0),
}


def stabilised_cosine(out: npt.NDArray[np.floating], eps: float = EPS) -> npt.NDArray[np.float64]:
    """(<o_w, o_full> + eps) / (|o_w| |o_full| + eps), in float64: the score of SeqCalib (HeadWiseKV, arXiv 2609.02029).

    out: [n_window + 1, n_query, n_gqa, head_dim_v], as replay() returns it. Returns [n_query, n_gqa, n_window].
    Outputs that are equal score exactly 1, also where both are zero.
    """
    windowed, full = np.asarray(out[:-1], np.float64), np.asarray(out[-1], np.float64)
    dot = (windowed * full).sum(-1)
    # sqrt(x * x) is x, which sqrt(x) * sqrt(x) is not: a threshold of 1 must take equal outputs
    norms = np.sqrt((windowed * windowed).sum(-1) * (full * full).sum(-1))
    return np.moveaxis((dot + eps) / (norms + eps), 0, -1)


@dataclass(frozen=True, eq=False)
class LayerScores:
    """Scores of one configurable layer, reduced over queries but not over heads; two are equal if they read alike as
    JSON.

    windows: the candidates in tokens, ascending. n_sink: first positions that every window sees.
    mean, p1, p5: [n_head_kv, n_window]: the mean over the query heads of the GQA group for each query, and then mean,
    1st and 5th percentile over the queries (linear between ranks).
    head_mean, head_p1, head_p5: [n_head, n_window]: the same of every query head by itself.
    """

    __pydantic_config__ = KNOWN_KEYS

    layer: Count
    windows: tuple[Count, ...]
    n_sink: Count
    mean: ShortTable
    p1: ShortTable
    p5: ShortTable
    head_mean: ShortTable
    head_p1: ShortTable
    head_p5: ShortTable

    def __post_init__(self) -> None:
        """HwkvError if an array has another shape than its neighbours."""
        for name in (*STATISTICS, *(f"head_{name}" for name in STATISTICS)):
            shape, like = getattr(self, name).shape, self.head_mean if name.startswith("head_") else self.mean
            if shape != (len(like), len(self.windows)):
                raise HwkvError(
                    f"scores of layer {self.layer}: key '{name}' has the shape {shape},"
                    f" ({len(like)}, {len(self.windows)}) expected"
                )

    @classmethod
    def of(cls, layer: Layer, windows: Sequence[int], n_sink: int, outputs: Outputs) -> "LayerScores":
        """Of what a Layer's attention gives under each window. outputs: of Layerwise.replay(). HwkvError if it is no
        number anywhere."""
        cosines = [np.concatenate([stabilised_cosine(out) for out in traces]) for traces in outputs]
        scores = cls.from_cosines(layer.layer, windows, n_sink, cosines)
        if not np.isfinite(scores.mean).all():
            raise HwkvError(
                f"layer {layer.layer}: the attention output on the trace holds values that are no numbers,"
                " so no window can be judged"
            )
        return scores

    @classmethod
    def from_cosines(
        cls, layer: int, windows: Sequence[int], n_sink: int, cosines: Sequence[npt.NDArray[np.float64]]
    ) -> "LayerScores":
        """cosines: one [n_query, n_gqa, n_window] per KV head, as stabilised_cosine() returns it. HwkvError if shapes
        differ."""
        windows = tuple(int(w) for w in windows)
        shapes = {c.shape for c in cosines}
        if len(shapes) != 1 or not (
            len(shape := shapes.pop()) == 3 and min(shape[:2]) > 0 and shape[2] == len(windows)
        ):
            raise HwkvError(
                f"scores of layer {layer} have shapes {[c.shape for c in cosines]}; the same [n_query, n_gqa,"
                f" {len(windows)}] for every KV head expected"
            )
        grouped = np.stack([c.mean(1) for c in cosines], 1)
        single = np.concatenate(cosines, 1)
        return cls(
            layer,
            windows,
            n_sink,
            **{name: statistic(grouped) for name, statistic in STATISTICS.items()},
            **{f"head_{name}": statistic(single) for name, statistic in STATISTICS.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Scores have 7 significant digits, so that noise of the last bits does not change the text."""
        return to_data(self)

    @classmethod
    def from_dict(cls, data: Any) -> "LayerScores":
        """HwkvError if a key is missing, unknown or not what it should be."""
        return parse(cls, data, "scores")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerScores) and self.to_dict() == other.to_dict()


def shortest_window(
    row_scores: Sequence[float] | npt.NDArray[np.float64], windows: Sequence[int], tau: float
) -> int | None:
    """The shortest window whose score is at least tau, or None, which is full. Scores need not grow with the window."""
    for score, window in zip(row_scores, windows, strict=True):
        if score >= tau:
            return window
    return None
