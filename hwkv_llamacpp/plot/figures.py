"""The look of all charts, and the figures of a report as SVG texts. matplotlib is imported on first use."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, overload

from . import heatmap
from .heatmap import INK, WindowTable, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
COLORS = {"upstream": "#8a96a3", "full": "#16324f"}
POLICY_COLORS = ("#d9822b", "#45aab0", "#7a5ba6", "#b33a3a", "#5a8f29")


class Section(Protocol):
    """What is drawn of a report.comparison.Section."""

    @property
    def arms(self) -> Sequence[str]: ...

    @property
    def contexts(self) -> Sequence[int]: ...  # tokens, ascending

    @property
    def reference(self) -> str | None: ...  # the arm that the others are compared with

    def median(self, arm: str, n_ctx: int, name: str, /) -> float | None: ...

    def ratio(self, arm: str, n_ctx: int, name: str, /) -> float | None: ...


class Pair(Protocol):
    """What is drawn of a report.comparison.Pair, the boundary of one arm in tokens."""

    @property
    def last_success(self) -> int | None: ...

    @property
    def first_failure(self) -> int | None: ...

    @property
    def is_confirmed(self) -> bool: ...


def memory(section: Section) -> str:
    """SVG of the median peak memory over the context, one line for each arm. Dashed lines are predictions."""
    figure, axes = chart(6.4, 3.6)
    for arm, color in colors(section.arms).items():
        points = [
            (n, peak, section.median(arm, n, "predicted_peak_bytes"))
            for n in section.contexts
            if (peak := section.median(arm, n, "peak_bytes"))
        ]
        if points:
            axes.plot(
                [p[0] for p in points],
                [p[1] / MIB for p in points],
                "o-",
                color=color,
                label=arm,
                markersize=5,
                linewidth=1.8,
            )
            predicted = [(n, peak) for n, _, peak in points if peak]
            if len(predicted) == len(points):
                axes.plot(
                    [p[0] for p in predicted],
                    [p[1] / MIB for p in predicted],
                    "--",
                    color=color,
                    linewidth=1,
                    alpha=0.6,
                )
    axes.set(ylabel="peak, MiB", ylim=(0, axes.dataLim.y1 * 1.1 if axes.lines else None))
    _contexts(axes, section.contexts)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, title="dashed: predicted", title_fontsize=7)
    return _svg(figure)


def throughput(section: Section) -> str | None:
    """SVG of the speed of prefill and decode as a share of the reference's. None without a reference."""
    if section.reference is None:
        return None
    figure, panels = chart(8, 3.2, 2)
    for axes, (name, what) in zip(panels, (("prefill_ts", "prefill"), ("decode_ts", "decode"))):
        for arm, color in colors(section.arms).items():
            points = [(n, ratio) for n in section.contexts if (ratio := section.ratio(arm, n, name))]
            if points and arm != section.reference:
                axes.plot(
                    [p[0] for p in points],
                    [p[1] for p in points],
                    "o-",
                    color=color,
                    label=arm,
                    markersize=5,
                    linewidth=1.8,
                )
        axes.axhline(1, color=colors(section.arms)[section.reference], linewidth=1.2)
        axes.set(title=what, ylim=(0, None), ylabel=f"share of {section.reference}'s t/s")
        axes.title.set(fontsize=9, color=INK)
        _contexts(axes, section.contexts)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return _svg(figure)


def capacity(pairs: Mapping[str, Pair]) -> str:
    """SVG of the boundaries by arm: a bar up to the last success, a mark at the first failure."""
    from matplotlib.ticker import MultipleLocator

    figure, axes = chart(6.8, 0.9 + 0.5 * len(pairs))
    longest = max((pair.first_failure or pair.last_success or 0 for pair in pairs.values()), default=0)
    for y, (arm, color) in enumerate(colors(pairs).items()):
        pair = pairs[arm]
        if pair.last_success:
            axes.barh(y, pair.last_success, color=color, height=0.55)
        if pair.first_failure:
            axes.plot([pair.first_failure] * 2, [y - 0.33, y + 0.33], color="#b33a3a", linewidth=2)
        text = f"{pair.last_success or 0:,} ran, " + (
            f"{pair.first_failure:,} did not" if pair.first_failure else "no failure found"
        )
        text += "" if pair.is_confirmed else " (not confirmed)"
        end = pair.first_failure or pair.last_success or 0
        axes.text(end + longest * 0.02, y, text, va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.set(xlim=(0, longest * 1.95 or 1), ylim=(len(pairs) - 0.4, -0.6), xlabel="context, tokens")
    axes.grid(axis="y", visible=False)  # it would run through the texts
    axes.xaxis.set_major_locator(MultipleLocator(_step(longest)))
    axes.xaxis.set_major_formatter(lambda n, _: short(int(n)))
    axes.xaxis.label.set(color=INK, fontsize=9)
    return _svg(figure)


def _step(longest: int) -> int:
    """Tokens between two ticks: the least power of two, from 1024 on, that leaves at most eight ticks."""
    step = 1024
    while longest > 8 * step:
        step *= 2
    return step


def policy(policy: WindowTable) -> str:
    """SVG of the heatmap of a policy."""
    return _svg(heatmap.draw(policy))


def colors(arms: Iterable[str]) -> dict[str, str]:
    """{arm: colour}, the same colour for the same place among the policies."""
    found: dict[str, str] = {}
    n = 0
    for arm in arms:
        found[arm] = COLORS.get(arm) or POLICY_COLORS[n % len(POLICY_COLORS)]
        n += arm not in COLORS
    return found


@overload
def chart(width: float, height: float) -> tuple[Figure, Axes]: ...
@overload
def chart(width: float, height: float, n_panels: int) -> tuple[Figure, list[Axes]]: ...
def chart(width: float, height: float, n_panels: int | None = None) -> tuple[Figure, Axes | list[Axes]]:
    """An empty chart of so many inches: no frame, a pale grid behind the marks. Needs no display.

    Returns (figure, axes); with n_panels (figure, [axes of each panel, from left to right]).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, n_panels or 1, squeeze=False)[0])
    for one in panels:
        one.grid(axis="both", color="#e3e7eb", linewidth=0.8)
        one.set_axisbelow(True)
        one.tick_params(labelsize=8, labelcolor=INK, length=0)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            one.spines[side].set_color("#c3cad1")
        one.yaxis.label.set(color=INK, fontsize=9)
    return figure, panels if n_panels else panels[0]


def _contexts(axes: Axes, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [short(n) for n in contexts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("context, tokens", color=INK, fontsize=9)


def _svg(figure: Figure) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hwkv"}):  # the same rows give the same page
        figure.savefig(out, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
