"""Replay against a masked softmax written out key by key's visibility, in float64."""

import math
import tracemalloc

import numpy as np
import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.calibration.replay import replay

TOLERANCE = 1e-5  # of an output's error, relative to the output's norm; float32 outputs and weights


def brute_force(q, positions, k, v, windows, *, scale, n_sink=0, softcap=0.0, sinks=None):
    """Each query head, query and window by itself: mask, softmax over what is visible, average."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.empty((len(windows) + 1, len(q), q.shape[1], v.shape[1]))
    for b, window in enumerate([*windows, math.inf]):
        for i, p in enumerate(positions):
            visible = [j for j in range(len(k)) if j <= p and (p - j < window or j < n_sink)]
            for head in range(q.shape[1]):
                logits = [scale * (q[i, head] @ k[j]) for j in visible]
                if softcap:
                    logits = [softcap * math.tanh(x / softcap) for x in logits]
                learned = [] if sinks is None else [float(sinks[head])]
                highest = max(logits + learned)
                weights = np.array([math.exp(x - highest) for x in logits])
                out[b, i, head] = weights @ v[visible] / (weights.sum() + sum(math.exp(x - highest) for x in learned))
    return out


def error(actual, expected):
    """The largest error of an output vector, relative to its norm."""
    return np.max(np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1))


def arrays(n_token, n_query, n_gqa=2, head_dim_k=16, head_dim_v=24, seed=0):
    """Random q, positions, k and v; the queries are in random order and some stand at one position."""
    random = np.random.default_rng([seed, n_token, n_query, n_gqa])
    positions = random.integers(0, n_token, n_query)
    positions[:3] = n_token - 1, 0, n_token - 1
    q, k, v = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((n_query, n_gqa, head_dim_k), (n_token, head_dim_k), (n_token, head_dim_v))
    )
    return 2 * q, positions, k, v


CASES = [  # n_token, n_query, n_gqa, windows, other arguments
    (101, 11, 1, [1, 2, 3, 5, 16, 64], {}),
    (101, 11, 2, [1, 7, 100, 101, 102, 5000], {}),  # one short of the length, the length, beyond it
    (211, 13, 3, [32, 64, 128], {"n_block": 1}),
    (211, 13, 6, [32, 64, 128], {"n_block": 7}),
    (211, 37, 8, [32, 64, 128], {"n_block": 32}),
    *((97, 7, n_gqa, [5, 40], {}) for n_gqa in (4, 5, 7)),
    (101, 11, 2, [9], {"n_sink": 1}),
    (101, 11, 3, [1, 9, 50, 200], {"n_sink": 4}),
    (101, 11, 2, [9, 63, 64, 65], {"n_sink": 64, "n_block": 7}),  # more sinks than most windows have tokens
    (101, 11, 2, [9, 50], {"n_sink": 101}),
    (101, 11, 2, [9, 50, 300], {"n_sink": 400}),
    (101, 11, 2, [], {}),  # full history alone
    (1, 3, 2, [1, 2], {"n_sink": 1}),
    (101, 11, 2, [4, 32], {"softcap": 3.0}),
    (101, 11, 2, [4, 32], {"softcap": 50.0, "n_sink": 4}),
    (101, 11, 3, [4, 32], {"sinks": [-1.0, 2.0, 30.0]}),
    (101, 11, 3, [1, 4, 32], {"sinks": [-300.0, 0.5, 5.0], "n_sink": 4, "softcap": 8.0}),
]


@pytest.mark.parametrize(("n_token", "n_query", "n_gqa", "windows", "options"), CASES)
def test_equals_brute_force(n_token, n_query, n_gqa, windows, options):
    given = (*arrays(n_token, n_query, n_gqa), windows)
    actual = replay(*given, scale=0.25, **options)
    expected = brute_force(*given, scale=0.25, **{name: value for name, value in options.items() if name != "n_block"})
    assert actual.dtype == np.float32 and actual.shape == (len(windows) + 1, n_query, n_gqa, 24)
    assert error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("lift", [200, -200, 1000, -1000])
@pytest.mark.parametrize("where", ["oldest key", "sink positions", "middle key", "near keys"])
@pytest.mark.parametrize("learned", [None, [0.0, 150.0]])
def test_logits_far_apart(lift, where, learned):
    """Weights beside which others are less than float32 can say, even float64: a window still has its own softmax."""
    q, positions, k, v = arrays(101, 11)
    positions = 60 + positions % 41
    keys = {"oldest key": [0], "sink positions": [0, 1, 2, 3], "middle key": [40], "near keys": range(52, 101)}[where]
    q[:, :, 0], k[:, 0] = 4, 0
    k[keys, 0] = lift
    given = (q, positions, k, v, [1, 8, 32, 90])
    for n_sink in (0, 4):
        options = {"scale": 0.25, "n_sink": n_sink, "sinks": learned}
        expected = brute_force(*given, **options)
        actual = replay(*given, **options)
        # a learned sink that takes nearly all leaves outputs near e-150 and below, of which float32 has none
        held = np.linalg.norm(expected, axis=-1) > 1e-30
        assert held.any() and np.isfinite(actual).all()
        assert error(actual[held], expected[held]) < TOLERANCE
        assert np.abs(actual[~held]).max(initial=0) <= 1e-29


def test_windows_off_by_one_are_seen():
    """What the tolerance must tell apart: one key more or less is an error a thousand times larger."""
    q, positions, k, v = arrays(101, 11)
    positions = np.maximum(positions, 40)
    windows = np.array([2, 8, 32])
    expected = brute_force(q, positions, k, v, windows, scale=0.25, n_sink=4)
    for wrong, n_sink in ((windows + 1, 4), (windows - 1, 4), (windows, 3), (windows, 5)):
        actual = replay(q, positions, k, v, wrong, scale=0.25, n_sink=n_sink)
        assert all(error(actual[b], expected[b]) > 1000 * TOLERANCE for b in range(3))
        assert error(actual[3], expected[3]) < TOLERANCE  # full history has no window
    assert (
        error(replay(q, np.maximum(positions - 1, 0), k, v, windows, scale=0.25, n_sink=4), expected) > 1000 * TOLERANCE
    )


def test_blocks_do_not_matter():
    """Blocks only decide which logits one matrix product makes: the results agree far inside the tolerance."""
    given = (*arrays(307, 71, 3), [16, 64, 250])
    whole = replay(*given, scale=0.25, n_sink=4, n_block=71)
    for n_block in (1, 7, 8, 32, 1000):
        assert error(replay(*given, scale=0.25, n_sink=4, n_block=n_block), whole) < 1e-6


def test_a_window_over_all_is_full_to_the_bit():
    """So that such a window scores exactly 1, whatever the other windows are."""
    out = replay(*arrays(101, 11), [5, 101, 300], scale=0.25, sinks=[0.5, 1.0])
    assert (out[1] == out[-1]).all() and (out[2] == out[-1]).all()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int16])
def test_positions_of_any_integer_type(dtype):
    q, positions, k, v = arrays(101, 11)
    out = replay(q, positions.astype(dtype), k, v, [5, 300], scale=0.25, n_sink=4)
    assert (out == replay(q, positions, k, v, [5, 300], scale=0.25, n_sink=4)).all()


def test_no_queries():
    q, positions, k, v = arrays(101, 11)
    assert replay(q[:0], positions[:0], k, v, [4], scale=1).shape == (2, 0, 2, 24)


def test_inputs_are_left_alone():
    given = arrays(101, 11)
    before = [x.copy() for x in given]
    replay(*given, [4, 32], scale=0.25, softcap=3.0, n_sink=4, sinks=np.array([1.0, 2.0]))
    assert all((x == y).all() for x, y in zip(given, before))


@pytest.mark.parametrize("n_gqa", [1, 4])
def test_memory_is_that_of_a_block(n_gqa):
    """Beside its result: float64 copies of q and k, and what the docstring says of a block. Windows and queries add
    nothing."""
    n_token, n_block, head_dim = 5000, 8, 32

    def peak(n_query, windows):
        q, positions, k, v = arrays(n_token, n_query, n_gqa, head_dim, head_dim)
        positions = n_token - 1 - positions % 100  # so that all blocks are about as long
        tracemalloc.start()
        out = replay(q, positions, k, v, windows, scale=0.2, n_block=n_block)
        beside = tracemalloc.get_traced_memory()[1] - out.nbytes - 2 * q.nbytes
        tracemalloc.stop()
        return beside

    block, keys = n_block * n_token * 8, n_token * head_dim * 8
    few = peak(2 * n_block, [256, 1024])
    assert n_gqa * block + keys < few < (3 * n_gqa + 2) * block + keys
    for n_query, windows in (
        (2 * n_block, [64, 256, 512, 1024]),
        (4 * n_block, [256, 1024]),
        (16 * n_block, range(64, 1025, 64)),
    ):
        assert peak(n_query, windows) == pytest.approx(few, rel=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": [4, 4]}, "windows [4, 4]; ascending numbers of tokens, each at least 1, expected"),
        ({"windows": [0, 4]}, "windows [0, 4]; ascending"),
        ({"positions": [0] * 10 + [101]}, "a query outside of its 101 keys: positions from 0 to 100 expected"),
        ({"positions": [-1] * 11}, "positions from 0 to 100 expected"),
        ({"positions": [0.5] * 11}, "positions from 0 to 100 expected"),
        ({"positions": [0] * 10}, "arrays of shapes q (11, 2, 16), positions (10,), k (101, 16), v (101, 24)"),
        ({"v": np.zeros((100, 24))}, "v (100, 24)"),
        ({"k": np.zeros((101, 8))}, "k (101, 8)"),
        ({"sinks": [1.0]}, "learned sinks of shape (1,), (2,) expected"),
        ({"n_sink": -1}, "n_sink -1"),
        ({"n_block": 0}, "n_block 0"),
    ],
)
def test_refused(change, message):
    q, positions, k, v = arrays(101, 11)
    with pytest.raises(HwkvError) as caught:
        replay(**{"q": q, "positions": positions, "k": k, "v": v, "windows": [4], "scale": 1, **change})
    assert message in str(caught.value)
