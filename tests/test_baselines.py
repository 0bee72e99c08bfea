"""Baselines as policies, and the largest of them within a budget."""

import collections

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.budgets import largest
from hwkv_llamacpp.baselines.random import random_windows
from hwkv_llamacpp.baselines.streaming import streaming
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.policy.footprint import predict

WINDOWS = [None, 64, 512, 256]


@pytest.fixture
def geometry(metadata_gguf):
    """6 layers of 4 KV heads of 64."""
    return ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {"block_count": 6, "embedding_length": 512, "attention.head_count": 8, "attention.head_count_kv": 4},
        )
    )


def test_streaming(geometry):
    policy = streaming(geometry, 1020)
    assert policy.layers == {il: (1020,) * 4 for il in range(6)} and policy.n_sink == 4
    assert policy.provenance == {"method": "streaming", "window": 1020, "made_by": "hand"}
    assert policy.model == geometry.describe()
    assert policy.retention(4096, geometry) == 0.25
    assert Policy.from_json(policy.to_json()) == policy
    assert streaming(geometry, 8, n_sink=64).n_sink == 64


def test_uniform_with_sinks(geometry):
    policy = uniform(geometry, 1016, [(0, None), (1, 2)], n_sink=8)
    assert policy.n_sink == 8 and policy.layers[1] == (1016, 1016, None, 1016)
    assert policy.retention(4096, geometry) == (5 + 19 / 4) / 24


# random


def windows_of(policy):
    return [w for row in policy.layers.values() for w in row]


def test_random_is_reproducible(geometry):
    policy = random_windows(geometry, WINDOWS, seed=1, n_sink=4)
    assert policy == random_windows(geometry, sorted(WINDOWS, key=str), seed=1, n_sink=4)
    assert policy != random_windows(geometry, WINDOWS, seed=2, n_sink=4)
    assert policy.n_sink == 4
    assert policy.provenance == {"method": "random", "windows": "64,256,512,full", "seed": 1, "made_by": "hand"}
    assert windows_of(policy)[:8] == [
        64,
        None,
        None,
        256,
        256,
        256,
        512,
        None,
    ]  # of this seed, in every version of Python


def test_random_draws_all_windows_alike(geometry):
    drawn = collections.Counter(w for seed in range(100) for w in windows_of(random_windows(geometry, WINDOWS, seed)))
    assert set(drawn) == set(WINDOWS)
    assert all(abs(n - 600) < 4 * (2400 * 0.25 * 0.75) ** 0.5 for n in drawn.values())  # four standard deviations


# budgets


@pytest.mark.parametrize("retention", [0.01, 0.1, 1 / 3, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("n_ctx", [999, 4096])
@pytest.mark.parametrize(
    "make",
    [
        lambda geometry, w: uniform(geometry, w),
        lambda geometry, w: uniform(geometry, w, n_sink=3),
        lambda geometry, w: streaming(geometry, w),
    ],
)
def test_largest_window_within_a_retention(geometry, retention, n_ctx, make):
    """Every KV head alike: min(T, w + n_sink) <= R T."""
    budget = Budget(n_ctx, retention=retention)
    policy = largest(geometry, budget, lambda w: make(geometry, w))
    (window,) = set(windows_of(policy))
    assert window == (n_ctx if retention == 1 else int(retention * n_ctx + 1e-9) - policy.n_sink)
    assert policy.retention(n_ctx, geometry) <= retention
    assert retention == 1 or make(geometry, window + 1).retention(n_ctx, geometry) > retention
    assert policy.provenance == {**make(geometry, window).provenance, "retention": retention, "n_ctx": n_ctx}


def test_largest_window_beside_full_heads(geometry):
    policy = largest(geometry, Budget(4096, retention=0.5), lambda w: uniform(geometry, w, [(0, None)]))
    assert policy.layers[1][0] == 1638 == int((12 - 4) * 4096 / 20)
    with pytest.raises(
        HwkvError, match="no window fits: 1 token per KV head is a retention of 0.1669 at 4,096 tokens, at most 0.15"
    ):
        largest(geometry, Budget(4096, retention=0.15), lambda w: uniform(geometry, w, [(0, None)]))


def test_largest_window_within_bytes(geometry):
    """Cells come in blocks of 256, so the window is the last that needs no further block."""
    token = 24 * 2 * 128  # of 24 KV heads, K and V of 64 values in F16
    policy = largest(geometry, Budget(8192, budget_bytes=2048 * token), lambda w: uniform(geometry, w))
    assert set(windows_of(policy)) == {2048 - 512}  # beside the micro-batch
    assert predict(geometry, policy, 8192).kv_bytes == 2048 * token
    assert (
        largest(geometry, Budget(8192, budget_bytes=2304 * token - 1), lambda w: uniform(geometry, w)).layers
        == policy.layers
    )
    assert policy.provenance["budget_bytes"] == 2048 * token and policy.provenance["n_ctx"] == 8192
    with pytest.raises(
        HwkvError, match="no window fits: 1 token per KV head is 4,718,592 bytes at 8,192 tokens, at most 99 expected"
    ):
        largest(geometry, Budget(8192, budget_bytes=99), lambda w: uniform(geometry, w))


@pytest.mark.parametrize(
    "budget",
    [
        Budget(2048, retention=0.05),
        Budget(2048, retention=0.3),
        Budget(2048, retention=0.8),
        Budget(2048, retention=1.0),
        Budget(8192, budget_bytes=50 * 2**19),
    ],
)
@pytest.mark.parametrize("n_sink", [0, 4])
def test_random_within_a_budget(geometry, budget, n_sink):
    seen = set()
    for seed in range(5):
        policy = random_windows(geometry, WINDOWS, seed, n_sink, budget)
        assert policy == random_windows(geometry, WINDOWS, seed, n_sink, budget)
        assert budget.holds(geometry, policy)
        ascending = [64, 256, 512, None]
        for il, row in policy.layers.items():  # as near as can be: no KV head can take its next longer window
            for head, window in enumerate(row):
                for longer in ascending[ascending.index(window) + 1 :][:1]:
                    raised = Policy({**policy.layers, il: [*row[:head], longer, *row[head + 1 :]]}, n_sink)
                    assert not budget.holds(geometry, raised)
        assert policy.provenance == {
            "method": "random",
            "windows": "64,256,512,full",
            "seed": seed,
            **budget.describe(),
            "made_by": "hand",
        }
        seen.add(tuple(windows_of(policy)))
    assert len(seen) == (1 if budget.retention == 1.0 else 5)


def test_random_needs_room_for_the_shortest(geometry):
    with pytest.raises(
        HwkvError,
        match="the shortest window, 64, does not fit: it is a retention of 0.03125 at 2,048 tokens, at most 0.03",
    ):
        random_windows(geometry, WINDOWS, 0, 0, Budget(2048, retention=0.03))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a retention or a number of bytes"),
        ({"retention": 0.5, "budget_bytes": 5}, "either a retention or a number of bytes"),
        ({"retention": 0.0}, "a retention of 0.0, above 0 and at most 1 expected"),
        ({"retention": 1.01}, "a retention of 1.01, above 0"),
        ({"retention": float("nan")}, "a retention of nan, above 0"),
        ({"n_ctx": 0, "retention": 0.5}, "set at 0 tokens, at least 1 expected"),
    ],
)
def test_budgets_that_are_none(arguments, message):
    with pytest.raises(HwkvError, match=message):
        Budget(**{"n_ctx": 4096, **arguments})


def test_duo_keeps_those_full_that_lose_most(geometry):
    from hwkv_llamacpp.baselines.duo import duo
    from hwkv_llamacpp.policy.budget import Budget

    losses = {
        layer.layer: [(layer.layer * 7 + head * 5) % 11 for head in range(layer.n_head_kv)]
        for layer in geometry.configurable
    }
    n_heads = sum(map(len, losses.values()))
    policy = duo(geometry, losses, 60, Budget(1024, 0.5), n_sink=4)
    full = {(il, head) for il, row in policy.layers.items() for head, w in enumerate(row) if w is None}
    assert {w for row in policy.layers.values() for w in row} == {None, 60} and policy.n_sink == 4
    assert policy.retention(1024, geometry) <= 0.5 < policy.retention(1024, geometry) + (1 - 64 / 1024) / n_heads
    kept = sorted((losses[il][head] for il, head in full), reverse=True)
    assert kept == sorted((x for row in losses.values() for x in row), reverse=True)[: len(kept)]
    assert policy.provenance == {"method": "duo", "window": 60, "retention": 0.5, "n_ctx": 1024, "made_by": "hand"}
