"""Replay: what a KV head's sampled queries would have got with each candidate window, from one pass over its keys.

The windows of one query are nested: each sees what the next shorter one sees, and a band of older keys. So the sums of
the softmax are carried from the newest band to the oldest, as online softmax carries them (Milakov and Gimelshein 2018,
arXiv 1805.02867), and divided at the end of every band. All windows together cost what full attention costs.

The running maximum is what makes it exact: a window whose logits all lie far below an older key's would vanish beside
that key, but here it is scaled by its own maximum. Logits are float64, because the absolute error of a logit is the
relative error of its weight; weights are float32, the sums over bands float64.
"""

import numpy as np

from .errors import HwkvError


def replay(q, positions, k, v, windows, *, scale, n_sink=0, softcap=0.0, sinks=None, n_block=32):
    """Attention outputs of one KV head of one layer and sequence, under every window and with full history.

    q: [n_query, n_gqa, head_dim_k], as the attention sees it (after RoPE); the query heads of the GQA group.
    positions: [n_query] integers, in any order. The query at position p sees keys 0 to p.
    k: [n_token, head_dim_k], v: [n_token, head_dim_v]: one row per position, as the cache holds them.
    windows: tokens, ascending, each at least 1; the query at p sees key j iff j <= p and (p - j < window or j < n_sink).
    scale: factor on q k. softcap: where positive, a logit x becomes softcap * tanh(x / softcap).
    sinks: [n_gqa] learned logits that join the denominator without a value (gpt-oss), or None. Not the n_sink positions.
    n_block: queries whose logits are held at once: n_block x n_gqa x n_token float64, beside a float64 copy of q and k.

    Returns [len(windows) + 1, n_query, n_gqa, head_dim_v] in float32; the last one has full history.
    HwkvError where shapes, positions or windows do not fit together.
    """
    q, k, v, positions = np.asarray(q, np.float64), np.asarray(k, np.float64), np.asarray(v, np.float32), np.asarray(positions)
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    _check(q, positions, k, v, windows, n_sink, sinks, n_block)
    out = np.empty((len(windows) + 1, *q.shape[:2], v.shape[1]), np.float32)
    order = np.argsort(positions, kind="stable")  # the queries of a block are neighbours, and see about as many keys
    for block in (order[i:i + n_block] for i in range(0, len(q), n_block)):
        out[:, block] = _block(q[block], positions[block] + 1, k, v, windows, scale, n_sink, softcap, sinks)
    return out


def _block(q, seen, k, v, windows, scale, n_sink, softcap, sinks):
    """Outputs of queries of which each sees its first `seen` keys; seen is ascending. [len(windows) + 1, n, n_gqa, head_dim_v]."""
    logits = scale * q.reshape(-1, q.shape[2]) @ k[:seen[-1]].T
    if softcap > 0:
        logits /= softcap
        np.tanh(logits, out=logits)
        logits *= softcap
    logits = logits.reshape(*q.shape[:2], -1)
    return np.stack([_windows(x[:, :n], v[:n], windows, min(n_sink, n), sinks) for x, n in zip(logits, seen)], 1)


def _windows(logits, v, windows, n_sink, sinks):
    """Outputs of one query, at the last position. logits: [n_gqa, n]; v: [n, head_dim_v]. [len(windows) + 1, n_gqa, head_dim_v]."""
    n_gqa, n = logits.shape
    highest = np.full((n_gqa, 1), -np.inf) if sinks is None else sinks[:, None]
    total = np.zeros((n_gqa, 1)) if sinks is None else np.ones((n_gqa, 1))
    value = np.zeros((n_gqa, v.shape[1]))
    out = np.empty((len(windows) + 1, *value.shape), np.float32)
    bands, end = [(0, n_sink)], n  # the first positions belong to every window
    for start in (*(max(n - w, n_sink) for w in windows), n_sink):
        bands.append((start, end))
        end = start
    for index, (start, end) in enumerate(bands):
        if start < end:
            before, highest = highest, np.maximum(highest, logits[:, start:end].max(1, keepdims=True))
            weights = np.exp((logits[:, start:end] - highest).astype(np.float32))
            rescale = np.exp(before - highest)
            total = total * rescale + weights.sum(1, keepdims=True, dtype=np.float64)
            value = value * rescale + weights @ v[start:end]
        if index:  # band 0 alone is no window
            out[index - 1] = value / total
    return out


def _check(q, positions, k, v, windows, n_sink, sinks, n_block):
    shapes = f"q {q.shape}, positions {positions.shape}, k {k.shape}, v {v.shape}"
    if (q.ndim, positions.ndim, k.ndim, v.ndim) != (3, 1, 2, 2) or len(q) != len(positions) or len(k) != len(v) or q.shape[2] != k.shape[1]:
        raise HwkvError(f"replay has arrays of shapes {shapes}; [n_query, n_gqa, head_dim_k], [n_query],"
                        " [n_token, head_dim_k] and [n_token, head_dim_v] expected")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise HwkvError(f"replay has learned sinks of shape {sinks.shape}, ({q.shape[1]},) expected: one per query head")
    if positions.dtype.kind not in "iu" or len(positions) and not 0 <= positions.min() <= positions.max() < len(k):
        raise HwkvError(f"replay has a query outside of its {len(k)} keys: positions from 0 to {len(k) - 1} expected")
    if any(w < 1 for w in windows) or any(a >= b for a, b in zip(windows, windows[1:])):
        raise HwkvError(f"replay has windows {list(windows)}; ascending numbers of tokens, each at least 1, expected")
    if n_sink < 0 or n_block < 1:
        raise HwkvError(f"replay has n_sink {n_sink} and n_block {n_block}; at least 0 and at least 1 expected")
