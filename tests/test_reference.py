"""The reference's blocked attention against the visibility rule, key by key."""

import numpy as np
import pytest
from reference.attention import attention


def one_output(q, k, v, scale, p, window, n_sink):
    """What a query q [d] at position p gets, from the definition."""
    seen = [j for j in range(p + 1) if window is None or p - j < window or j < n_sink]
    weight = np.exp((k[seen] @ q * scale).astype(np.float64))
    return weight @ v[seen] / weight.sum()


@pytest.mark.parametrize("n_sink", [0, 1, 5])
def test_attention_sees_what_the_rule_says(n_sink):
    rng = np.random.default_rng(0)
    n_tokens, n_gqa, windows = 300, 2, (None, 1, 16, 130, 1000)
    q = rng.standard_normal((n_tokens, n_gqa * len(windows), 8), np.float32)
    k, v = rng.standard_normal((2, n_tokens, len(windows), 8), np.float32)
    out = attention(q, k, v, 0.5, windows, n_sink)
    for kv_head, window in enumerate(windows):
        for head in (n_gqa * kv_head, n_gqa * kv_head + 1):
            for p in range(0, n_tokens, 13):
                expected = one_output(q[p, head], k[:, kv_head], v[:, kv_head], 0.5, p, window, n_sink)
                np.testing.assert_allclose(out[p, head], expected, atol=1e-5)
