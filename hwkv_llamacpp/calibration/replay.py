"""Replay: what a KV head's sampled queries would have got with each candidate window, from one pass over its keys.

The windows of one query are nested: each sees what the next shorter one sees, and a band of older keys. So the sums of
the softmax are carried from the newest band to the oldest, as online softmax carries them (Milakov and Gimelshein 2018,
arXiv 1805.02867), and divided at the end of every band. All windows together cost about one attention with full
history.

The running maximum makes it exact. All logits of a window may lie far below that of an older key. With one maximum for
all windows, the weights of such a window would be rounded to zero; here they are scaled by its own maximum.

Logits are float64, because the absolute error of a logit is the relative error of its weight. Weights are float32, and
the sums over bands are float64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import HwkvError


def replay(
    q: npt.ArrayLike,
    positions: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    windows: Sequence[int],
    *,
    scale: float,
    n_sink: int = 0,
    softcap: float = 0.0,
    sinks: npt.ArrayLike | None = None,
    n_block: int = 8,
) -> npt.NDArray[np.float32]:
    """Attention outputs of one KV head of one layer and sequence, under every window and with full history.

    q: [n_query, n_gqa, head_dim_k], as the attention sees it (after RoPE); the query heads of the GQA group.
    positions: [n_query] integers, in any order. The query at position p sees keys 0 to p.
    k: [n_token, head_dim_k], v: [n_token, head_dim_v]: one row per position, as the cache holds them.
    windows: tokens, ascending, each at least 1. The query at p sees key j iff j <= p and (p - j < window or
    j < n_sink).
    scale: factor on q k. softcap: where positive, a logit x becomes softcap * tanh(x / softcap).
    sinks: [n_gqa] learned logits that join the denominator without a value (gpt-oss), or None. Not the n_sink
    positions.
    n_block: queries that are taken together, neighbours by position. With more the matrix products are larger, but
    keys are also read for queries that lie too far away from them. Memory beside the result is at most
    n_block x (3 n_gqa + 2) x n_token float64 and a float64 copy of q and k, however many windows and queries there are.

    Returns [len(windows) + 1, n_query, n_gqa, head_dim_v]; the last one has full history.
    HwkvError where shapes, positions or windows do not fit together.
    """
    q, k, v = np.asarray(q, np.float64), np.asarray(k, np.float64), np.asarray(v, np.float32)
    positions = np.asarray(positions)
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    _check(q, positions, k, v, windows, n_sink, sinks, n_block)
    positions = positions.astype(np.int64)  # an unsigned difference would be no distance
    out = np.empty((len(windows) + 1, *q.shape[:2], v.shape[1]), np.float32)
    order = np.argsort(positions, kind="stable")
    for block in (order[i : i + n_block] for i in range(0, len(q), n_block)):
        out[:, block] = _block(q[block], positions[block], k, v, windows, scale, n_sink, softcap, sinks)
    return out


def _block(
    q: npt.NDArray[np.float64],
    positions: npt.NDArray[np.int64],
    k: npt.NDArray[np.float64],
    v: npt.NDArray[np.float32],
    windows: Sequence[int],
    scale: float,
    n_sink: int,
    softcap: float,
    sinks: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float32]:
    """Outputs of queries at ascending positions. [len(windows) + 1, n_query, n_gqa, head_dim_v]."""
    n_query, n_gqa, head_dim_k = q.shape
    n_token = positions[-1] + 1
    logits = scale * q.reshape(-1, head_dim_k) @ k[:n_token].T
    if softcap > 0:
        logits /= softcap
        np.tanh(logits, out=logits)
        logits *= softcap
    logits = logits.reshape(n_query, n_gqa, n_token)
    highest = np.broadcast_to(-np.inf if sinks is None else sinks[:, None], (n_query, n_gqa, 1))
    total = np.full(highest.shape, 0.0 if sinks is None else 1.0)
    value = np.zeros((n_query, n_gqa, v.shape[1]))
    out = np.empty((len(windows) + 1, *value.shape), np.float32)

    # (first key, end of keys, least distance, end of distances). The sink positions come first: all windows see them
    bands = [(0, min(n_sink, n_token), 0, n_token)]
    for near, far in zip((0, *windows), (*windows, n_token)):
        bands.append((max(n_sink, positions[0] - far + 1), n_token - near, near, far))
    for index, (start, end, near, far) in enumerate(bands):
        if start < end:
            distance = positions[:, None] - np.arange(start, end)
            band = np.where(((near <= distance) & (distance < far))[:, None], logits[:, :, start:end], -np.inf)
            before, highest = highest, np.maximum(highest, band.max(2, keepdims=True))
            band -= highest
            weights = band.astype(np.float32)
            np.exp(weights, out=weights)
            rescale = np.exp(before - highest)
            total = total * rescale + weights.sum(2, keepdims=True, dtype=np.float64)
            value = value * rescale + (weights.reshape(-1, end - start) @ v[start:end]).reshape(value.shape)
        if index:  # not after the sink positions alone: they are no window
            out[index - 1] = value / total
    return out


def _check(
    q: npt.NDArray[np.float64],
    positions: npt.NDArray[np.integer],
    k: npt.NDArray[np.float64],
    v: npt.NDArray[np.float32],
    windows: Sequence[int],
    n_sink: int,
    sinks: npt.NDArray[np.float64] | None,
    n_block: int,
) -> None:
    shapes = f"q {q.shape}, positions {positions.shape}, k {k.shape}, v {v.shape}"
    if (
        (q.ndim, positions.ndim, k.ndim, v.ndim) != (3, 1, 2, 2)
        or len(q) != len(positions)
        or len(k) != len(v)
        or q.shape[2] != k.shape[1]
    ):
        raise HwkvError(
            f"replay has arrays of shapes {shapes}; [n_query, n_gqa, head_dim_k], [n_query],"
            " [n_token, head_dim_k] and [n_token, head_dim_v] expected"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise HwkvError(
            f"replay has learned sinks of shape {sinks.shape}, ({q.shape[1]},) expected: one per query head"
        )
    if positions.dtype.kind not in "iu" or len(positions) and not 0 <= positions.min() <= positions.max() < len(k):
        raise HwkvError(f"replay has a query outside of its {len(k)} keys: positions from 0 to {len(k) - 1} expected")
    if any(w < 1 for w in windows) or any(a >= b for a, b in zip(windows, windows[1:])):
        raise HwkvError(f"replay has windows {list(windows)}; ascending numbers of tokens, each at least 1, expected")
    if n_sink < 0 or n_block < 1:
        raise HwkvError(f"replay has n_sink {n_sink} and n_block {n_block}; at least 0 and at least 1 expected")
