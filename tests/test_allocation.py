"""Spending a budget on windows: against all policies there are, and the budgets themselves."""

import itertools

import numpy as np
import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.allocation import allocate
from hwkv_llamacpp.budget import Budget

WINDOWS = [64, 256, 512, 1024]
N_CTX = 2048


@pytest.fixture
def geometry(metadata_gguf):
    """2 layers of 2 KV heads."""
    return ModelGeometry.from_gguf(metadata_gguf("llama", {
        "block_count": 2, "embedding_length": 256, "attention.head_count": 4, "attention.head_count_kv": 2}))


def falling(rng, geometry):
    """Losses that fall with the window, of very different size for different heads."""
    return {layer.layer: np.sort(rng.random((layer.n_head_kv, len(WINDOWS))), axis=1)[:, ::-1] * 10.0 ** rng.integers(-4, 1, (layer.n_head_kv, 1))
            for layer in geometry.configurable}


def total(policy, losses):
    return sum(0.0 if w is None else losses[il][head][WINDOWS.index(w)] for il, row in policy.layers.items() for head, w in enumerate(row))


def every_policy(geometry, n_sink):
    heads = [(layer.layer, layer.n_head_kv) for layer in geometry.configurable]
    for cells in itertools.product([*WINDOWS, None], repeat=sum(n for _, n in heads)):
        cells = iter(cells)
        yield Policy({il: [next(cells) for _ in range(n)] for il, n in heads}, n_sink)


@pytest.mark.parametrize("n_sink", [0, 4])
def test_nothing_that_keeps_as_little_loses_less(geometry, n_sink):
    """Against every policy there is: often none is better, and none that keeps less by one head's share of the cells ever is."""
    rng = np.random.default_rng(n_sink)
    everything = [(policy.retention(N_CTX, geometry), policy) for policy in every_policy(geometry, n_sink)]
    optimal = 0
    for trial in range(20):
        losses, share = falling(rng, geometry), rng.uniform(0.1, 1)
        found = allocate(geometry, WINDOWS, losses, n_sink, Budget(N_CTX, share))
        kept = found.retention(N_CTX, geometry)
        assert kept <= share
        loss = total(found, losses)
        assert all(loss <= total(policy, losses) + 1e-12 for size, policy in everything if size <= kept - 0.25)
        optimal += all(loss <= total(policy, losses) + 1e-12 for size, policy in everything if size <= share)
    print(f"{optimal} of 20 are optimal")
    assert optimal >= 8


def test_budgets(geometry):
    losses = falling(np.random.default_rng(3), geometry)
    full = allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 1.0))
    assert all(w is None for row in full.layers.values() for w in row)
    shortest = allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 64 / N_CTX))
    assert {w for row in shortest.layers.values() for w in row} == {64}
    with pytest.raises(HwkvError, match="not even a window of 64 tokens for every KV head fits: it is a retention of 0.03125 at 2,048 tokens, at most 0.03"):
        allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 0.03))
    for n_bytes in (800_000, 1_000_000, 1_500_000):
        budget = Budget(N_CTX, budget_bytes=n_bytes, context={"n_ubatch": 64})
        assert budget.holds(geometry, allocate(geometry, WINDOWS, losses, 4, budget))


def test_a_head_that_loses_nothing_gets_the_shortest_window(geometry):
    losses = falling(np.random.default_rng(5), geometry)
    losses[1][0] = 0.0
    assert allocate(geometry, WINDOWS, losses, 0, Budget(N_CTX, 1.0)).layers[1] == (64, None)


def test_windows_beyond_the_context_are_no_candidates(geometry):
    losses = falling(np.random.default_rng(6), geometry)
    policy = allocate(geometry, WINDOWS, losses, 0, Budget(512, 1.0))
    assert {w for row in policy.layers.values() for w in row} == {None}
    assert {w for row in allocate(geometry, WINDOWS, losses, 0, Budget(512, 0.5)).layers.values() for w in row} <= {64, 256, None}
