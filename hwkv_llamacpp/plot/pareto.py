"""Records of a calibration side by side: what each keeps, and what it costs in quality."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..base.atomic import replacing
from . import figures
from .heatmap import INK


class Record(Protocol):
    """What is drawn of a calibration.run.Record."""

    @property
    def label(self) -> str: ...

    @property
    def n_sink(self) -> int: ...

    @property
    def retention(self) -> Mapping[int, float]: ...  # {n_tokens: share of KV cells kept}

    @property
    def distortion(self) -> Mapping[str, Any]: ...


def plot(records: Sequence[Record], path: str | Path, selected: Record | None = None, title: str | None = None) -> None:
    """Writes the picture as PNG: measured KL over retention at the longest recorded context.

    records: at least one. HwkvError if the file cannot be written.
    """
    figure, axes = figures.chart(6, 4)
    n = max(records[0].retention)
    for color, n_sink in zip(figures.POLICY_COLORS * len(records), dict.fromkeys(r.n_sink for r in records)):
        points = sorted(
            ((r.retention[n], r.distortion["kl"], r) for r in records if r.n_sink == n_sink),
            key=lambda point: point[:2],
        )
        axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points], color=color, marker="o", label=f"n_sink {n_sink}"
        )
        for x, y, r in points:
            axes.annotate(
                r.label + (" (selected)" if r is selected else ""),
                (x, y),
                textcoords="offset points",
                xytext=(6, 4),
                fontsize=8,
                color=INK,
            )
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    if all(r.distortion["kl"] > 0 for r in records):
        axes.set_yscale("log")
    axes.set_xlabel(f"share of KV cells kept at {n:,} tokens", fontsize=9, color=INK)
    axes.set_ylabel("KL against full KV, nats")
    axes.set_title((title or "").replace("$", r"\$"), fontsize=9, color=INK)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=160, facecolor="white")
    with replacing(path, overwrite=True) as file:
        file.write(data.getvalue())
