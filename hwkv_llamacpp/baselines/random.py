"""Windows drawn by chance, as a control."""

import argparse
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from ..base import options
from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.budget import Budget
from ..policy.policy import Policy
from .baseline import Baseline
from .budgets import asked_budget, budget_flags, sink_flag
from .rows import configurable, format_row, hand_made, row_option


class Random(Baseline):
    name = "random"
    help = "windows drawn by chance, as a control"
    details = (
        "Every KV head draws one of the windows, all with the same chance. Under a budget, heads draw in random order"
        " among the windows that still fit, and again upwards, until none can take its next longer window."
    )
    example = "hwkv policy make random model.gguf --windows 256,1024,full --seed 1 -o policy.json"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--windows", type=row_option, required=True, metavar="ROW", help='windows to draw from, as "256,1024,full"'
        )
        parser.add_argument(
            "--seed",
            type=options.whole(0, "a seed"),
            default=0,
            metavar="N",
            help="the same seed draws the same (default: %(default)s)",
        )
        sink_flag(parser, 0)
        budget_flags(parser, parser.add_mutually_exclusive_group())

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        return random_windows(geometry, args.windows, args.seed, args.sink, asked_budget(args, geometry))


def random_windows(
    geometry: ModelGeometry, windows: WindowRow, seed: int, n_sink: int = 0, budget: Budget | None = None
) -> Policy:
    """Every KV head draws one of the windows, all with the same chance. The same seed draws the same.

    With a Budget all heads begin with the shortest window. Then each, in random order, draws a window that is no
    shorter than its own and that still fits. This is repeated until no head can take its next longer window.
    HwkvError if the shortest window does not fit.
    """
    Policy({0: tuple(windows)})  # refuses what is no window, drawn or not
    windows = sorted(windows, key=lambda w: math.inf if w is None else w)
    chance = random.Random(seed).random  # the same numbers in every version of Python
    rows = {layer.layer: [windows[0]] * layer.n_head_kv for layer in configurable(geometry)}
    shown = {"method": "random", "windows": format_row(windows), "seed": seed}
    if budget is None:
        rows = {il: [windows[int(chance() * len(windows))] for _ in row] for il, row in rows.items()}
    else:
        _draw_within(budget, geometry, rows, windows, chance, n_sink)
        shown |= budget.describe()
    return hand_made(geometry, rows, shown, n_sink)


def _draw_within(
    budget: Budget,
    geometry: ModelGeometry,
    rows: Mapping[int, list[int | None]],
    windows: Sequence[int | None],
    chance: Callable[[], float],
    n_sink: int,
) -> None:
    """Draws the windows of the rows, in place, such that the Budget holds them. HwkvError if none does."""

    def policy() -> Policy:
        return Policy({il: tuple(row) for il, row in rows.items()}, n_sink)

    def fits(row: list[int | None], head: int, window: int | None) -> bool:
        before, row[head] = row[head], window
        held = budget.holds(geometry, policy())
        row[head] = before
        return held

    shortest = policy()
    if not budget.holds(geometry, shortest):
        raise HwkvError(
            f"the shortest window, {format_row(windows[:1])}, does not fit: it is {budget.shows(geometry, shortest)}"
        )
    heads = sorted(((row, head, 0) for row in rows.values() for head in range(len(row))), key=lambda _: chance())
    while heads:  # those that may still be raised, and the index of their window
        raised = []
        for row, head, low in heads:
            n_fit = bisect_left(range(low + 1, len(windows)), True, key=lambda i: not fits(row, head, windows[i]))
            index = low + int(chance() * (n_fit + 1))
            row[head] = windows[index]
            if index < low + n_fit:  # otherwise never again: what does not fit now fits even less later
                raised.append((row, head, index))
        heads = raised
