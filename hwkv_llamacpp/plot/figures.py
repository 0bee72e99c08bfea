"""The look of all charts, and the figures of a report as SVG texts. matplotlib is imported on first use."""

import io
import re

from . import heatmap
from .heatmap import INK, short

MIB = 2**20
COLORS = {"upstream": "#8a96a3", "full": "#16324f"}
POLICY_COLORS = ("#d9822b", "#45aab0", "#7a5ba6", "#b33a3a", "#5a8f29")


def memory(section):
    """Lines of the median peak by arm; dashes are the prediction."""
    figure, axes = chart(6.4, 3.6)
    for arm, color in colors(section.arms).items():
        points = [
            (n, section.median(arm, n, "peak_bytes"), section.median(arm, n, "predicted_peak_bytes"))
            for n in section.contexts
        ]
        points = [(n, peak, predicted) for n, peak, predicted in points if peak]
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
            if all(p[2] for p in points):
                axes.plot(
                    [p[0] for p in points], [p[2] / MIB for p in points], "--", color=color, linewidth=1, alpha=0.6
                )
    axes.set(ylabel="peak, MiB", ylim=(0, axes.dataLim.y1 * 1.1 if axes.lines else None))
    _contexts(axes, section.contexts)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, title="dashed: predicted", title_fontsize=7)
    return _svg(figure)


def throughput(section):
    """Prefill and decode as shares of the reference's."""
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


def capacity(pairs):
    """A bar up to the last success, a mark at the first failure."""
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


def _step(longest):
    """Ticks a power of two apart, 1K or more, at most eight up to the longest context."""
    step = 1024
    while longest > 8 * step:
        step *= 2
    return step


def policy(policy):
    return _svg(heatmap.draw(policy))


def colors(arms):
    """{arm: colour}"""
    found, n = {}, 0
    for arm in arms:
        found[arm] = COLORS.get(arm) or POLICY_COLORS[n % len(POLICY_COLORS)]
        n += arm not in COLORS
    return found


def chart(width, height, n_panels=None):
    """(figure, axes) in inches, or with n_panels (figure, [axes]): frameless, a pale grid behind the marks; needs no
    display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, n_panels or 1)
    for one in axes if n_panels else [axes]:
        one.grid(axis="both", color="#e3e7eb", linewidth=0.8)
        one.set_axisbelow(True)
        one.tick_params(labelsize=8, labelcolor=INK, length=0)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            one.spines[side].set_color("#c3cad1")
        one.yaxis.label.set(color=INK, fontsize=9)
    return figure, axes


def _contexts(axes, contexts):
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [short(n) for n in contexts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("context, tokens", color=INK, fontsize=9)


def _svg(figure):
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hwkv"}):  # the same rows give the same page
        figure.savefig(out, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
