"""SeqCalib from its definition: how near each KV head stays to full history, in float64, one masked softmax per
window."""

import numpy as np

from .visibility import visible

EPS = 1e-6


def scores(q, k, v, scale, positions, candidates, n_sink=0):
    """[n_query, n_head_kv, n_window]: cosines of the output under a window with the output of full history, mean over
    the GQA group.

    q: [T, n_head, d_k]; k: [T, n_head_kv, d_k]; v: [T, n_head_kv, d_v]. positions: of the queries. candidates: windows.
    """
    n_head_kv = k.shape[1]
    n_gqa = q.shape[1] // n_head_kv
    result = np.empty((len(positions), n_head_kv, len(candidates)))
    for head in range(n_head_kv):
        queries = q[positions, head * n_gqa : (head + 1) * n_gqa].astype(np.float64)
        logits = scale * np.einsum("qgd,kd->qgk", queries, k[:, head].astype(np.float64))

        def output(window, logits=logits, head=head):
            seen = visible(np.asarray(positions), np.arange(len(k)), window, n_sink)[:, None]
            weights = np.exp(
                np.where(seen, logits - logits.max(-1, keepdims=True, where=seen, initial=-np.inf), -np.inf)
            )
            return weights / weights.sum(-1, keepdims=True) @ v[:, head].astype(np.float64)

        full = output(None)
        for i, window in enumerate(candidates):
            cut = output(window)
            lengths = np.linalg.norm(cut, axis=-1) * np.linalg.norm(full, axis=-1)
            result[:, head, i] = (((cut * full).sum(-1) + EPS) / (lengths + EPS)).mean(-1)
    return result


def shortest(row, candidates, tau):
    """The first candidate that reaches tau, None (full) where none does."""
    return ([w for w, score in zip(candidates, row) if score >= tau] + [None])[0]


def layer_scores(model, sequences, positions, candidates, windows, n_sink=0):
    """{layer: mean scores [n_head_kv, n_window]} of the configurable layers, over all sequences, each layer under
    `windows` below it."""
    seen = {layer: [] for layer in model.configurable}

    def looking(layer, row, at):
        def look(q, k, v, scale):
            seen[layer].append(scores(q, k, v, scale, at, candidates, n_sink))
            return row

        return look

    for tokens, at in zip(sequences, positions):
        model.logits(
            tokens, {layer: looking(layer, windows[layer], at) for layer in model.configurable}, n_sink, positions=[0]
        )
    return {layer: np.concatenate(parts).mean(0) for layer, parts in seen.items()}
