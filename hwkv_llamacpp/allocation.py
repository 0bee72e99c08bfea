"""The windows that lose least within a budget, where the losses of KV heads add up.

Each KV head has an expected loss under every candidate window. From the shortest windows on, the budget is spent where a cell buys most:
along the lower convex hull of each head's (cells, loss) points, steepest steps first. This is the classic allocation of bits among
quantisers (Shoham and Gersho 1988, IEEE Trans. ASSP 36); it is optimal for every budget that it spends entirely.
"""

from .errors import HwkvError
from .policy import Policy


def allocate(geometry, windows, losses, n_sink, budget):
    """A Policy of least total loss that the Budget holds.

    windows: candidates in tokens, ascending. losses: {layer: [n_head_kv][n_window]}, of all configurable layers, any unit; full loses nothing.
    HwkvError if the shortest window does not fit.
    """
    layers = {layer.layer: layer for layer in geometry.configurable}
    windows = [w for w in windows if w + n_sink < budget.n_ctx] or windows[:1]
    rows = {il: [windows[0]] * layer.n_head_kv for il, layer in layers.items()}
    if not budget.holds(geometry, shortest := Policy(rows, n_sink)):
        raise HwkvError(f"not even a window of {windows[0]} tokens for every KV head fits: it is {budget.shows(geometry, shortest)}")
    steps = []
    for il, layer in layers.items():
        size = layer.head_dim_k + layer.head_dim_v if budget.budget_bytes is not None else 1
        cost = [size * (w + n_sink) for w in windows] + [size * budget.n_ctx]
        for head in range(layer.n_head_kv):
            for gain, k in _hull(cost, [float(x) for x in losses[il][head][:len(windows)]] + [0.0]):
                steps.append((-gain, il, head, k))
    closed = set()
    for _, il, head, k in sorted(steps):
        if (il, head) in closed:
            continue
        before, rows[il][head] = rows[il][head], windows[k] if k < len(windows) else None
        if not budget.holds(geometry, Policy(rows, n_sink)):
            rows[il][head] = before
            closed.add((il, head))  # longer ones fit even less; shorter steps of other heads may still
    return Policy(rows, n_sink)


def _hull(cost, loss):
    """Steps along the lower convex hull from the first point: (loss saved per cost, index of the point), each less steep than the one before."""
    steps, at = [], 0
    while at + 1 < len(cost):
        gain, k = max(((loss[at] - loss[k]) / (cost[k] - cost[at]), k) for k in range(at + 1, len(cost)))
        if gain <= 0:
            break
        steps.append((gain, k))
        at = k
    return steps
