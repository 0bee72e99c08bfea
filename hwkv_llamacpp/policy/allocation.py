"""The windows that lose least within a budget, where the losses of KV heads add up.

This is a multiple-choice knapsack: one window for each KV head, each with a cost and a loss. It is solved exactly. Only
a large budget is rounded: it is counted in at most MAX_UNITS units, and the cost of each head is rounded up to them.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..base.shape import ModelShape
from ..errors import HwkvError
from .budget import Budget
from .footprint import predict
from .policy import Policy

MAX_UNITS = 1 << 16


def allocate(
    geometry: ModelShape,
    windows: Sequence[int],
    losses: Mapping[int, npt.NDArray[np.float64] | Sequence[Sequence[float]]],
    n_sink: int,
    budget: Budget,
) -> Policy:
    """The Policy of least total loss that the Budget holds. Of equals it is one that keeps less.

    windows: candidates in tokens, ascending. losses: {layer: [n_head_kv, n_window]} of all configurable layers, in any
    unit; a full head loses nothing. HwkvError if the shortest window does not fit.
    """
    heads = [(layer, head) for layer in geometry.configurable for head in range(layer.n_head_kv)]
    options = [w for w in windows if w + n_sink < budget.n_ctx] or [windows[0]]
    loss = [[*(float(x) for x in losses[layer.layer][head][: len(options)]), 0.0] for layer, head in heads]
    costs, limit = _costs(geometry, [*options, None], n_sink, budget, len(heads))
    cost = [costs[layer.layer] for layer, _ in heads]
    unit = max(math.gcd(*(x for row in cost for x in row)), -(-limit // MAX_UNITS), 1)
    cost, room = [[-(-x // unit) for x in row] for row in cost], limit // unit

    # least[r]: the least loss of the heads so far in r units. taken: for each head, the option that gives it
    least = np.zeros(room + 1)
    taken = []
    for c, lost in zip(cost, loss):
        table = np.full((len(lost), room + 1), np.inf)
        for k in range(len(lost)):
            if c[k] <= room:
                table[k, c[k] :] = least[: room + 1 - c[k]] + lost[k]
        taken.append(table.argmin(axis=0).astype(np.int16))
        least = table.min(axis=0)
    if not np.isfinite(least[room]):
        shortest = Policy({layer.layer: (options[0],) * layer.n_head_kv for layer in geometry.configurable}, n_sink)
        raise HwkvError(
            f"not even a window of {options[0]} tokens for every KV head fits: it is {budget.shows(geometry, shortest)}"
        )
    rows: dict[int, list[int | None]] = {layer.layer: [None] * layer.n_head_kv for layer in geometry.configurable}
    for (layer, head), c, option in zip(reversed(heads), reversed(cost), reversed(taken)):
        k = int(option[room])
        rows[layer.layer][head] = [*options, None][k]
        room -= c[k]
    return Policy({il: tuple(row) for il, row in rows.items()}, n_sink)


def _costs(
    geometry: ModelShape, options: Sequence[int | None], n_sink: int, budget: Budget, n_heads: int
) -> tuple[dict[int, list[int]], int]:
    """({layer: integer cost of one of its KV heads under each option}, integer limit)."""
    if budget.retention is not None:
        cells = [budget.n_ctx if w is None else min(budget.n_ctx, w + n_sink) for w in options]
        return {layer.layer: cells for layer in geometry.configurable}, math.floor(
            budget.retention * budget.n_ctx * n_heads + 1e-6
        )
    costs: dict[int, list[int]] = {layer.layer: [] for layer in geometry.configurable}
    for w in options:
        policy = Policy({layer.layer: (w,) * layer.n_head_kv for layer in geometry.configurable}, n_sink)
        for group in predict(geometry, policy, budget.n_ctx, **budget.context).groups:
            for il, heads, size in group.layers:
                costs[il].append(size // heads)
    return costs, int(budget.limit)
