"""Norms, activations and rotary positions that several model families use."""

import numpy as np


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis; weight None means ones."""
    normed = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps))
    return normed if weight is None else normed * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    """GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def softplus(x):
    return np.logaddexp(0, x)


def rope(x, base, n_rot, interleaved):
    """Rotary positions on the first n_rot channels of x [T, heads, d]; token t stands at position t.

    Channel pair i turns by t * base^(-2i/n_rot). interleaved: pairs are (2i, 2i+1) as in llama, otherwise
    (i, i + n_rot/2) as in NeoX. Angles are taken in float64.
    """
    half = n_rot // 2
    angle = np.arange(len(x))[:, None] * float(base) ** (-2 * np.arange(half) / n_rot)
    cos, sin = (f(angle)[:, None, :].astype(np.float32) for f in (np.cos, np.sin))
    first, second = (slice(0, n_rot, 2), slice(1, n_rot, 2)) if interleaved else (slice(0, half), slice(half, n_rot))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out
