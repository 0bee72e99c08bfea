"""Dense llama: every layer has global attention."""

import numpy as np

from .attention import attention
from .layers import rms_norm, rope, silu


class Llama:
    """Architecture `llama` without experts, biases or rope scaling."""

    def __init__(self, weights):
        self.weights = weights
        self.n_layer = weights.value("block_count")
        self.n_head = weights.value("attention.head_count")
        self.n_head_kv = weights.value("attention.head_count_kv", self.n_head)
        self.eps = weights.value("attention.layer_norm_rms_epsilon")
        self.head_dim = weights.value("attention.key_length", weights.value("embedding_length") // self.n_head)
        self.n_rot = weights.value("rope.dimension_count", self.head_dim)
        self.rope_base = weights.value("rope.freq_base", 10000.0)
        self.configurable = {layer: self.n_head_kv for layer in range(self.n_layer)}

    def logits(self, tokens, windows, n_sink=0, positions=None):
        """Logits [len(positions), n_vocab] after the tokens at `positions` (default: all)."""
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        for index in range(self.n_layer):
            w = self.weights.layer(index)
            row = windows.get(index, (None,) * self.n_head_kv)
            x = x + self._attend(w, rms_norm(x, w("attn_norm.weight"), self.eps), row, n_sink)
            y = rms_norm(x, w("ffn_norm.weight"), self.eps)
            y = silu(y @ w("ffn_gate.weight").T) * (y @ w("ffn_up.weight").T)
            x = x + y @ w("ffn_down.weight").T
        if positions is not None:
            x = x[np.asarray(positions)]
        return rms_norm(x, self.weights["output_norm.weight"], self.eps) @ self.weights.output().T

    def _attend(self, w, x, row, n_sink):
        def heads(name, count):
            return (x @ w(name).T).reshape(len(x), count, self.head_dim)

        q = rope(heads("attn_q.weight", self.n_head), self.rope_base, self.n_rot, interleaved=True)
        k = rope(heads("attn_k.weight", self.n_head_kv), self.rope_base, self.n_rot, interleaved=True)
        v = heads("attn_v.weight", self.n_head_kv)
        out = attention(q, k, v, self.head_dim**-0.5, row, n_sink)
        return out.reshape(len(x), -1) @ w("attn_output.weight").T
