"""Spending a budget on windows: against all policies there are, and the budgets themselves."""

import itertools

import numpy as np
import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.policy.allocation import allocate
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.policy.footprint import predict

WINDOWS = [64, 256, 512, 1024]
N_CTX = 2048


@pytest.fixture
def geometry(metadata_gguf):
    """2 layers of 2 KV heads."""
    return ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {"block_count": 2, "embedding_length": 256, "attention.head_count": 4, "attention.head_count_kv": 2},
        )
    )


def falling(rng, geometry):
    """Losses that fall with the window, of very different size for different heads."""
    return {
        layer.layer: np.sort(rng.random((layer.n_head_kv, len(WINDOWS))), axis=1)[:, ::-1]
        * 10.0 ** rng.integers(-4, 1, (layer.n_head_kv, 1))
        for layer in geometry.configurable
    }


def total(policy, losses):
    return sum(
        0.0 if w is None else losses[il][head][WINDOWS.index(w)]
        for il, row in policy.layers.items()
        for head, w in enumerate(row)
    )


def every_policy(geometry, n_sink):
    heads = [(layer.layer, layer.n_head_kv) for layer in geometry.configurable]
    for cells in itertools.product([*WINDOWS, None], repeat=sum(n for _, n in heads)):
        cells = iter(cells)
        yield Policy({il: [next(cells) for _ in range(n)] for il, n in heads}, n_sink)


@pytest.mark.parametrize("n_sink", [0, 4])
def test_no_policy_that_fits_loses_less(geometry, n_sink):
    """Against every policy there is."""
    rng = np.random.default_rng(n_sink)
    everything = [(policy.retention(N_CTX, geometry), policy) for policy in every_policy(geometry, n_sink)]
    for _ in range(20):
        losses, share = falling(rng, geometry), rng.uniform(0.1, 1)
        found = allocate(geometry, WINDOWS, losses, n_sink, Budget(N_CTX, share))
        assert found.retention(N_CTX, geometry) <= share
        assert total(found, losses) == pytest.approx(
            min(total(policy, losses) for size, policy in everything if size <= share), abs=1e-12
        )


def test_no_policy_of_as_many_bytes_loses_less(geometry):
    """The same for bytes, as they are allocated."""
    rng = np.random.default_rng(7)
    context = {"n_ubatch": 64, "type_k": "q8_0", "type_v": "f16"}
    everything = [
        (predict(geometry, policy, N_CTX, **context).kv_bytes, policy) for policy in every_policy(geometry, 4)
    ]
    for n_bytes in (700_000, 1_000_000, 1_400_000):
        losses = falling(rng, geometry)
        found = allocate(geometry, WINDOWS, losses, 4, Budget(N_CTX, budget_bytes=n_bytes, context=context))
        assert predict(geometry, found, N_CTX, **context).kv_bytes <= n_bytes
        assert total(found, losses) == pytest.approx(
            min(total(policy, losses) for size, policy in everything if size <= n_bytes), abs=1e-12
        )


def test_rounded_costs_stay_within_the_budget(geometry):
    """Where costs have no large common divisor, and the units of a long context are coarse."""
    windows, rng = [63, 257, 1021, 4093, 50021], np.random.default_rng(8)
    losses = {
        layer.layer: np.sort(rng.random((layer.n_head_kv, 5)), axis=1)[:, ::-1] for layer in geometry.configurable
    }
    for share in (0.1, 0.5, 0.9):
        kept = allocate(geometry, windows, losses, 3, Budget(131071, share)).retention(131071, geometry)
        assert share - 0.25 < kept <= share


def test_budgets(geometry):
    losses = falling(np.random.default_rng(3), geometry)
    full = allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 1.0))
    assert all(w is None for row in full.layers.values() for w in row)
    shortest = allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 64 / N_CTX))
    assert {w for row in shortest.layers.values() for w in row} == {64}
    with pytest.raises(
        HwkvError,
        match="not even a window of 64 tokens for every KV head fits: it is a retention of 0.03125 at 2,048 tokens,"
        " at most 0.03",
    ):
        allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 0.03))


def test_a_head_that_loses_nothing_gets_the_shortest_window(geometry):
    losses = falling(np.random.default_rng(5), geometry)
    losses[1][0] = 0.0
    assert allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 1.0)).layers[1] == (64, None)


def test_windows_beyond_the_context_are_no_candidates(geometry):
    losses = falling(np.random.default_rng(6), geometry)
    policy = allocate(geometry, WINDOWS, losses, 0, Budget(512, 1.0))
    assert {w for row in policy.layers.values() for w in row} == {None}
    assert {w for row in allocate(geometry, WINDOWS, losses, 0, Budget(512, 0.5)).layers.values() for w in row} <= {
        64,
        256,
        None,
    }
