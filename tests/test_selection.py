"""Which record is deployed: the rule of the design, on records with known numbers."""

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.calibration.run import Record
from hwkv_llamacpp.calibration.selection import by_tau, within
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.policy.footprint import predict


@pytest.fixture
def geometry(metadata_gguf):
    """6 layers of 4 KV heads of 64."""
    return ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {"block_count": 6, "embedding_length": 512, "attention.head_count": 8, "attention.head_count_kv": 4},
        )
    )


def record(geometry, tau, window, kl, n_sink=0):
    """Of a policy that keeps window / 1024 of the cells at 1,024 tokens."""
    return Record({"tau": tau}, n_sink, uniform(geometry, window, n_sink=n_sink), {}, 1.0, {"kl": kl}, 0.0)


def by_retention(records, geometry, share, n_ctx):
    return within(records, geometry, Budget(n_ctx, share))


def by_bytes(records, geometry, n_bytes, n_ctx, **context):
    return within(records, geometry, Budget(n_ctx, None, n_bytes, context))


@pytest.fixture
def records(geometry):
    return [
        record(geometry, 0.9, 128, 0.5),
        record(geometry, 0.95, 256, 0.1),
        record(geometry, 0.99, 512, 0.2),
        record(geometry, 0.999, 768, 0.01),
    ]


@pytest.mark.parametrize(
    ("share", "tau"),
    [(1, 0.999), (0.75, 0.999), (0.7499, 0.95), (0.5, 0.95), (0.25, 0.95), (0.2499, 0.9), (0.125, 0.9)],
)
def test_least_distortion_within_a_retention(geometry, records, share, tau):
    """Not the most that fits: 0.99 keeps more than 0.95, and is worse."""
    for order in (records, records[::-1]):
        assert by_retention(order, geometry, share, 1024).setting["tau"] == tau


def test_the_retention_is_that_at_the_stated_context(geometry, records):
    assert by_retention(records, geometry, 0.25, 512).setting["tau"] == 0.9
    assert by_retention(records, geometry, 0.125, 8192).setting["tau"] == 0.999


def test_ties(geometry):
    """Equal distortion: the lower retention, and then the larger tau; the order of the records decides nothing."""
    same = [
        record(geometry, 0.9, 512, 0.1),
        record(geometry, 0.95, 256, 0.1),
        record(geometry, 0.98, 256, 0.1),
        record(geometry, 0.99, 768, 0.1),
    ]
    for order in (same, same[::-1], same[2:] + same[:2]):
        assert by_retention(order, geometry, 0.9, 1024).setting["tau"] == 0.98
        assert by_bytes(order, geometry, 2**30, 1024).setting["tau"] == 0.98


def test_retention_counts_the_sink_positions(geometry):
    with_sinks = [record(geometry, 0.9, 256, 0.1, n_sink=4), record(geometry, 0.95, 128, 0.2)]
    assert by_retention(with_sinks, geometry, 260 / 1024, 1024).setting["tau"] == 0.9
    assert by_retention(with_sinks, geometry, 259 / 1024, 1024).setting["tau"] == 0.95


def test_none_fits_names_the_nearest(geometry, records):
    with pytest.raises(HwkvError) as caught:
        by_retention(records, geometry, 0.1, 1024)
    assert str(caught.value).startswith(
        "no record fits the budget: the nearest, tau 0.9, is a retention of 0.125 at 1,024 tokens, at most 0.1"
        " expected; lower"
    )


def test_bytes_are_those_that_the_runtime_allocates(geometry, records):
    """Cells carry room for a micro-batch and come in blocks of 256, and a cache type has its own size."""
    for options in ({"n_ubatch": 64}, {"n_ubatch": 64, "type_k": "q8_0", "type_v": "q4_0"}):
        costs = {r.setting["tau"]: predict(geometry, r.policy, 8192, **options).kv_bytes for r in records}
        assert by_bytes(records, geometry, costs[0.999], 8192, **options).setting["tau"] == 0.999
        assert by_bytes(records, geometry, costs[0.999] - 1, 8192, **options).setting["tau"] == 0.95
        assert by_bytes(records, geometry, costs[0.95] - 1, 8192, **options).setting["tau"] == 0.9
        with pytest.raises(HwkvError) as caught:
            by_bytes(records, geometry, costs[0.9] - 1, 8192, **options)
        kept = f"{costs[0.9]:,} bytes at 8,192 tokens, at most {costs[0.9] - 1:,} expected"
        assert f"no record fits the budget: the nearest, tau 0.9, is {kept}" in str(caught.value)


def test_by_tau(geometry, records):
    assert by_tau(records, 0.95) is records[1]
    assert by_tau([*records, record(geometry, 0.95, 64, 0.05, n_sink=4)], 0.95).n_sink == 4  # the less distorted of two
    with pytest.raises(
        HwkvError, match=r"no record has tau 0\.5; there are tau 0\.9, tau 0\.95, tau 0\.99, tau 0\.999"
    ):
        by_tau(records, 0.5)
