"""Softmax attention in which every KV head has its own window."""

import numpy as np

from .visibility import visible

QUERY_BLOCK = 128


def attention(q, k, v, scale, windows, n_sink):
    """Attention output [T, n_head, d_v] in float32.

    q: [T, n_head, d_k]; k: [T, n_head_kv, d_k]; v: [T, n_head_kv, d_v]; token t stands at position t.
    scale: factor on q k. windows: one per KV head, None for full; or a function of q, k, v and scale that gives them.
    The query heads of a GQA group, which are neighbours, share the window of their KV head. The softmax is taken over
    visible keys only.
    """
    if callable(windows):
        windows = windows(q, k, v, scale)
    n_tokens, n_head_kv = k.shape[:2]
    if len(windows) != n_head_kv:
        raise ValueError(f"{len(windows)} windows for {n_head_kv} KV heads")
    n_gqa = q.shape[1] // n_head_kv
    out = np.empty((n_tokens, q.shape[1], v.shape[2]), np.float32)
    for kv_head, window in enumerate(windows):
        group = slice(kv_head * n_gqa, (kv_head + 1) * n_gqa)
        for start in range(0, n_tokens, QUERY_BLOCK):
            rows = np.arange(start, min(start + QUERY_BLOCK, n_tokens))
            # keys that no query of this block can see are left out; the mask alone decides among the rest
            first = 0 if window is None else max(0, start - window + 1)
            keys = np.concatenate([np.arange(min(n_sink, first)), np.arange(first, rows[-1] + 1)])
            mask = visible(rows, keys, window, n_sink)
            out[rows, group] = _softmax_average(
                q[rows, group] * np.float32(scale), k[keys, kv_head], v[keys, kv_head], mask
            )
    return out


def _softmax_average(q, k, v, mask):
    """q: [n, n_gqa, d_k]; k: [m, d_k]; v: [m, d_v]; mask: [n, m], some key visible in each row. [n, n_gqa, d_v]."""
    score = (q.reshape(-1, q.shape[2]) @ k.T).reshape(q.shape[0], q.shape[1], -1)
    score[np.broadcast_to(~mask[:, None, :], score.shape)] = -np.inf
    score -= score.max(-1, keepdims=True)
    np.exp(score, out=score)
    total = score.sum(-1, keepdims=True, dtype=np.float64)
    return (score.reshape(-1, len(k)) @ v).reshape(*q.shape[:2], -1) / total
