"""Gemma 3: five sliding-window layers, then one global layer, over and over.

Only the global layers take windows from a policy; the sliding layers keep the model's own.
"""

import numpy as np

from .attention import attention
from .layers import gelu, rms_norm, rope

SLIDING_PERIOD = 6  # layer il is global when (il + 1) % SLIDING_PERIOD == 0
SLIDING_ROPE_BASE = 10000.0


class Gemma3:
    """Architecture `gemma3`, text only."""

    def __init__(self, weights):
        self.weights = weights
        self.n_layer = weights.value("block_count")
        self.n_embd = weights.value("embedding_length")
        self.n_head = weights.value("attention.head_count")
        self.n_head_kv = weights.value("attention.head_count_kv")
        self.head_dim = weights.value("attention.key_length")
        self.n_swa = weights.value("attention.sliding_window")
        self.eps = weights.value("attention.layer_norm_rms_epsilon")
        self.rope_base = weights.value("rope.freq_base")
        self.configurable = {layer: self.n_head_kv for layer in range(self.n_layer) if not self._sliding(layer)}

    @staticmethod
    def _sliding(layer):
        return (layer + 1) % SLIDING_PERIOD != 0

    def logits(self, tokens, windows, n_sink=0, positions=None):
        """Logits [len(positions), n_vocab] after the tokens at `positions` (default: all)."""
        if set(windows) - set(self.configurable):
            raise ValueError(f"layers {sorted(set(windows) - set(self.configurable))} are not global")
        x = self.weights["token_embd.weight"][np.asarray(tokens)] * np.float32(np.sqrt(self.n_embd))
        for index in range(self.n_layer):
            w = self.weights.layer(index)
            if self._sliding(index):
                row, sinks, base = (self.n_swa,) * self.n_head_kv, 0, SLIDING_ROPE_BASE
            else:
                row, sinks, base = windows.get(index, (None,) * self.n_head_kv), n_sink, self.rope_base
            y = self._attend(w, rms_norm(x, w("attn_norm.weight"), self.eps), row, sinks, base)
            x = x + rms_norm(y, w("post_attention_norm.weight"), self.eps)
            y = rms_norm(x, w("ffn_norm.weight"), self.eps)
            y = gelu(y @ w("ffn_gate.weight").T) * (y @ w("ffn_up.weight").T)
            x = x + rms_norm(y @ w("ffn_down.weight").T, w("post_ffw_norm.weight"), self.eps)
        if positions is not None:
            x = x[np.asarray(positions)]
        return rms_norm(x, self.weights["output_norm.weight"], self.eps) @ self.weights.output().T

    def _attend(self, w, x, row, n_sink, rope_base):
        def heads(name, count):
            return (x @ w(name).T).reshape(len(x), count, self.head_dim)

        def turned(name, count, norm):
            return rope(rms_norm(heads(name, count), w(norm), self.eps), rope_base, self.head_dim, interleaved=False)

        q = turned("attn_q.weight", self.n_head, "attn_q_norm.weight")
        k = turned("attn_k.weight", self.n_head_kv, "attn_k_norm.weight")
        v = heads("attn_v.weight", self.n_head_kv)
        out = attention(q, k, v, self.head_dim**-0.5, row, n_sink)
        return out.reshape(len(x), -1) @ w("attn_output.weight").T
