"""A picture of a policy: layers from left to right, KV heads from top to bottom, the window as colour.

matplotlib is imported on first use: it is slow to load, and most commands draw nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..base.atomic import check_target, replacing
from ..base.shape import LayerShape, ModelShape, WindowRow
from ..errors import HwkvError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMED = 9  # up to this many different windows stand in the legend one by one
MAX_NUMBERED = 32  # up to this many layers the cells have room for numbers
FULL_COLOR = "#16324f"
INK = "#333f4d"


class WindowTable(Protocol):
    """What is drawn of a policy.Policy."""

    @property
    def layers(self) -> Mapping[int, WindowRow]: ...

    def row(self, layer: LayerShape, /) -> WindowRow: ...


def plot(
    policy: WindowTable,
    path: str | Path,
    geometry: ModelShape | None = None,
    overwrite: bool = False,
    title: str | None = None,
) -> None:
    """Writes the picture of a policy: PNG, SVG or PDF by the name's ending.

    It shows the layers that the policy lists; with a geometry, all layers that can take windows. HwkvError if there is
    nothing to draw, the format is unknown, or the file cannot be written.
    """
    suffix = str(path).rpartition(".")[2].lower()
    if suffix not in ("png", "svg", "pdf"):
        raise HwkvError(f"{path}: a name that ends in .png, .svg or .pdf expected")
    check_target(path, overwrite)
    data = io.BytesIO()
    draw(policy, geometry, title).savefig(data, format=suffix, dpi=160, facecolor="white")
    with replacing(path, overwrite) as file:
        file.write(data.getvalue())


def draw(policy: WindowTable, geometry: ModelShape | None = None, title: str | None = None) -> Figure:
    """The picture as a matplotlib Figure. Needs no display. HwkvError if there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows: Mapping[int, WindowRow] = (
        {layer.layer: policy.row(layer) for layer in geometry.configurable} if geometry else policy.layers
    )
    if not rows:
        raise HwkvError("the policy lists no layer: there is nothing to draw")
    n_layers, n_heads = len(rows), max(map(len, rows.values()))
    windows = sorted({w for row in rows.values() for w in row if w is not None})
    any_full = any(w is None for row in rows.values() for w in row)

    # the more KV a head keeps, the darker: short windows are pale, full is the darkest
    cmap = LinearSegmentedColormap.from_list("windows", ["#fdf0b8", "#a5d8a8", "#45aab0", "#2f73a8"])
    low, high = (windows[0], windows[-1]) if windows else (1, 2)
    norm = LogNorm(low, high) if high > low else LogNorm(low / 2, high * 2)

    numbered = n_layers <= MAX_NUMBERED
    cell = 0.46 if numbered else 0.27
    patches = [Patch(color=FULL_COLOR, label="full")] if any_full else []
    if len(windows) <= MAX_NAMED:
        patches = [Patch(color=cmap(norm(w)), label=short(w)) for w in windows] + patches
    margin = 1.0  # inches beside the cells
    width = max(cell * n_layers + margin, 0.68 * len(patches) + 0.6, 3.4)
    figure = Figure(
        figsize=(width, cell * n_heads + (1.3 if title else 1.05) + 0.35 * (len(windows) > MAX_NAMED)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for x, row in enumerate(rows.values()):
        for y, window in enumerate(row):
            color = FULL_COLOR if window is None else cmap(norm(window))
            axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color, edgecolor="none"))
            if numbered:
                dark = window is None or norm(window) > 0.6
                axes.text(
                    x + 0.5,
                    y + 0.52,
                    short(window),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else INK,
                )
    room = max(0, ((width - margin) / cell - n_layers) / 2)  # few layers keep cells of the usual size
    axes.set(xlim=(-room, n_layers + room), ylim=(n_heads, 0), aspect="equal")
    step = max(1, -(-n_layers // 40))
    axes.set_xticks([x + 0.5 for x in range(0, n_layers, step)], [str(il) for il in rows][::step])
    step = max(1, -(-n_heads // 24))
    axes.set_yticks([y + 0.5 for y in range(0, n_heads, step)], [str(y) for y in range(0, n_heads, step)])
    axes.tick_params(length=0, labelsize=8 if numbered else 6.5, labelcolor=INK)
    axes.set_xlabel("layer", color=INK, fontsize=9)
    axes.set_ylabel("KV head", color=INK, fontsize=9)
    axes.spines["left"].set_position(("data", 0))  # labels stay beside the cells
    for spine in axes.spines.values():
        spine.set_visible(False)
    if title:
        figure.suptitle(title.replace("$", r"\$"), color=INK, fontsize=10)

    if patches:
        legend = figure.legend(
            handles=patches,
            loc="outside lower center",
            ncols=len(patches),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
            handlelength=1.1,
            handleheight=1.1,
            columnspacing=1.2,
            borderaxespad=0.2,
            title="window, tokens" if len(windows) <= MAX_NAMED else None,
            title_fontsize=8,
        )
        legend.get_title().set_color(INK)
    if len(windows) > MAX_NAMED:
        powers = [2**k for k in range(32) if low <= 2**k <= high] or [low, high]
        bar = figure.colorbar(
            ScalarMappable(norm, cmap),
            ax=axes,
            orientation="horizontal",
            aspect=40,
            pad=0.04,
            shrink=min(1, 6 / figure.get_figwidth()),
        )
        bar.set_label("window, tokens", color=INK, fontsize=8)
        bar.ax.xaxis.set_major_locator(FixedLocator(powers[:: max(1, len(powers) // 8)]))
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda w, _: short(round(w))))
        bar.ax.xaxis.set_minor_locator(NullLocator())
        bar.ax.tick_params(labelsize=7, labelcolor=INK, length=2)
        bar.outline.set_visible(False)
    return figure


def short(window: int | None) -> str:
    """A number of tokens in at most five characters: 512, 1.5K, 128K, 2G; None is "full"."""
    if window is None:
        return "full"
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if window >= unit:
            return f"{window / unit:.4g}"[:4].rstrip(".") + name
    return str(window)
