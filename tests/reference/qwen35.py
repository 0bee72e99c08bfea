"""Qwen3.5-style hybrid: gated delta net layers, and each n-th layer with gated full attention.

Only the full-attention layers have a KV cache and take windows.
"""

import numpy as np

from .attention import attention
from .layers import rms_norm, rope, sigmoid, silu, softplus


class Qwen35:
    """Architecture `qwen35`, text only, without next-token-prediction layers."""

    def __init__(self, weights):
        self.weights = weights
        self.n_layer = weights.value("block_count")
        self.n_head = weights.value("attention.head_count")
        self.n_head_kv = weights.value("attention.head_count_kv")
        self.head_dim = weights.value("attention.key_length")
        self.n_rot = weights.value("rope.dimension_count")
        self.rope_base = weights.value("rope.freq_base")
        self.eps = weights.value("attention.layer_norm_rms_epsilon")
        self.linear_dim = weights.value("ssm.state_size")
        self.linear_k_heads = weights.value("ssm.group_count")
        self.linear_v_heads = weights.value("ssm.time_step_rank")
        self.interval = weights.value("full_attention_interval", 4)
        self.configurable = {layer: self.n_head_kv for layer in range(self.n_layer) if (layer + 1) % self.interval == 0}

    def logits(self, tokens, windows, n_sink=0, positions=None):
        """Logits [len(positions), n_vocab] after the tokens at `positions` (default: all)."""
        if set(windows) - set(self.configurable):
            raise ValueError(f"layers {sorted(set(windows) - set(self.configurable))} have no full attention")
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        for index in range(self.n_layer):
            w = self.weights.layer(index)
            y = rms_norm(x, w("attn_norm.weight"), self.eps)
            if index in self.configurable:
                x = x + self._attend(w, y, windows.get(index, (None,) * self.n_head_kv), n_sink)
            else:
                x = x + self._delta_net(w, y)
            y = rms_norm(x, w("post_attention_norm.weight"), self.eps)
            y = silu(y @ w("ffn_gate.weight").T) * (y @ w("ffn_up.weight").T)
            x = x + y @ w("ffn_down.weight").T
        if positions is not None:
            x = x[np.asarray(positions)]
        return rms_norm(x, self.weights["output_norm.weight"], self.eps) @ self.weights.output().T

    def _attend(self, w, x, row, n_sink):
        """Attention whose output is multiplied by a sigmoid gate; gate and query come from one projection."""
        n_tokens = len(x)
        q, gate = np.split((x @ w("attn_q.weight").T).reshape(n_tokens, self.n_head, 2 * self.head_dim), 2, axis=-1)
        k = (x @ w("attn_k.weight").T).reshape(n_tokens, self.n_head_kv, self.head_dim)
        v = (x @ w("attn_v.weight").T).reshape(n_tokens, self.n_head_kv, self.head_dim)
        q = rope(rms_norm(q, w("attn_q_norm.weight"), self.eps), self.rope_base, self.n_rot, interleaved=False)
        k = rope(rms_norm(k, w("attn_k_norm.weight"), self.eps), self.rope_base, self.n_rot, interleaved=False)
        out = attention(q, k, v, self.head_dim**-0.5, row, n_sink) * sigmoid(gate)
        return out.reshape(n_tokens, -1) @ w("attn_output.weight").T

    def _delta_net(self, w, x):
        """Gated delta net: a causal convolution over q, k, v, then the delta rule token by token."""
        n_tokens, dim = len(x), self.linear_dim
        mixed = silu(causal_convolution(x @ w("attn_qkv.weight").T, w("ssm_conv1d.weight")))
        q, k, v = np.split(mixed, [dim * self.linear_k_heads, 2 * dim * self.linear_k_heads], axis=-1)
        q = unit(q.reshape(n_tokens, self.linear_k_heads, dim), self.eps) * np.float32(dim**-0.5)
        k = unit(k.reshape(n_tokens, self.linear_k_heads, dim), self.eps)
        v = v.reshape(n_tokens, self.linear_v_heads, dim)
        # value head h reads key head h modulo their number
        q, k = (np.tile(y, (1, self.linear_v_heads // self.linear_k_heads, 1)) for y in (q, k))
        decay = np.exp(w("ssm_a") * softplus(x @ w("ssm_alpha.weight").T + w("ssm_dt.bias")))
        beta = sigmoid(x @ w("ssm_beta.weight").T)
        out = delta_rule(q, k, v, decay, beta)
        gate = silu((x @ w("attn_gate.weight").T).reshape(out.shape))
        out = rms_norm(out, w("ssm_norm.weight"), self.eps) * gate
        return out.reshape(n_tokens, -1) @ w("ssm_out.weight").T


def causal_convolution(x, kernel):
    """Depthwise convolution of x [T, channels] with kernel [channels, taps]; the last tap meets the token itself."""
    taps = kernel.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), x.dtype), x])
    return sum(padded[i : i + len(x)] * kernel[:, i] for i in range(taps))


def unit(x, eps):
    """x over its length, along the last axis."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + np.float32(eps))


def delta_rule(q, k, v, decay, beta):
    """The recurrence itself, in float32: S <- decay S; S <- S + k beta (v - k S); o = q S.

    q, k: [T, heads, d_k]; v: [T, heads, d_v]; decay, beta: [T, heads]. S starts at zero. Returns [T, heads, d_v].
    """
    state = np.zeros((k.shape[1], k.shape[2], v.shape[2]), np.float32)
    out = np.empty(v.shape, np.float32)
    for t in range(len(q)):
        state *= decay[t, :, None, None]
        missing = v[t] - (k[t, :, None, :] @ state)[:, 0]
        state += k[t, :, :, None] * (beta[t, :, None] * missing)[:, None, :]
        out[t] = (q[t, :, None, :] @ state)[:, 0]
    return out
