"""Scores against their formulas, their reduction over queries and GQA groups, JSON, and the choice by threshold."""

import json

import numpy as np
import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.calibration.replay import replay
from hwkv_llamacpp.calibration.scores import LayerScores, shortest_window, stabilised_cosine

WINDOWS = (4, 16, 64)


def outputs(seed, n_token=150, n_query=40, n_gqa=3, head_dim=16, **options):
    """[n_window + 1, n_query, n_gqa, head_dim] of one KV head with random content."""
    random = np.random.default_rng(seed)
    q, k, v = (
        random.normal(size=shape) for shape in ((n_query, n_gqa, head_dim), (n_token, head_dim), (n_token, head_dim))
    )
    return replay(q, random.integers(75, n_token, n_query), k, v, WINDOWS, scale=1.0, **options)


@pytest.fixture(scope="module")
def cosines():
    """Of 2 KV heads with 3 query heads each."""
    return [stabilised_cosine(outputs(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def scores(cosines):
    return LayerScores.from_cosines(7, WINDOWS, 4, cosines)


# the cosine


def test_cosine_is_the_formula():
    out = outputs(3)
    actual = stabilised_cosine(out, eps=0.01)
    assert actual.shape == (40, 3, 3)
    for w, i, head in ((0, 0, 0), (2, 39, 1), (1, 20, 2)):
        o, full = (np.asarray(x, float) for x in (out[w, i, head], out[-1, i, head]))
        assert actual[i, head, w] == pytest.approx(
            (sum(o * full) + 0.01) / (np.sqrt(sum(o * o)) * np.sqrt(sum(full * full)) + 0.01), rel=1e-12
        )


def test_full_scores_one_exactly():
    """A threshold of 1 takes a window that changes nothing."""
    out = outputs(4, n_token=200)
    assert (stabilised_cosine(np.stack([out[-1], out[-1]])) == 1).all()
    assert (stabilised_cosine(np.zeros((2, 1, 1, 8), np.float32)) == 1).all()
    assert (stabilised_cosine(out)[..., 0] < 1).all()


def test_small_differences_are_resolved():
    """1 - cosine of outputs that differ by an angle of 1e-5 is 5e-11, which float32 products would lose."""
    out = np.array([[1, 1e-5], [1, 0]], np.float32).reshape(2, 1, 1, 2)
    assert 1 - stabilised_cosine(out)[0, 0, 0] == pytest.approx(5e-11, rel=1e-3)


# the reduction


def test_shapes(scores):
    assert {x.shape for x in (scores.mean, scores.p1, scores.p5)} == {(2, 3)}
    assert {x.shape for x in (scores.head_mean, scores.head_p1, scores.head_p5)} == {(6, 3)}


def test_gqa_mean_comes_before_the_statistic_over_queries(cosines, scores):
    for kv_head, cosine in enumerate(cosines):
        per_query = np.array([[sum(cosine[i, :, w]) / 3 for w in range(3)] for i in range(40)])
        assert scores.mean[kv_head] == pytest.approx(per_query.mean(0))
        for name, percent in (("p1", 1), ("p5", 5)):
            rank = percent / 100 * 39
            low, high = np.sort(per_query, 0)[[int(rank), int(rank) + 1]]
            assert getattr(scores, name)[kv_head] == pytest.approx(low + (rank - int(rank)) * (high - low))
    # the percentile of a mean is not the mean of percentiles
    assert not np.allclose(scores.p5, scores.head_p5.reshape(2, 3, 3).mean(1), atol=1e-3)


def test_query_heads_are_in_order(cosines, scores):
    """Query head h belongs to KV head h // n_gqa."""
    for head in range(6):
        cosine = cosines[head // 3][:, head % 3]
        assert scores.head_mean[head] == pytest.approx(cosine.mean(0))
        assert scores.head_p1[head] == pytest.approx(np.percentile(cosine, 1, axis=0))
        assert scores.head_p5[head] == pytest.approx(np.percentile(cosine, 5, axis=0))
    assert scores.mean == pytest.approx(scores.head_mean.reshape(2, 3, 3).mean(1))


def test_cosines_of_other_shapes_are_refused(cosines):
    for wrong in ([cosines[0], cosines[1][:, :2]], [cosines[0][..., :2]], [cosines[0][:0]], []):
        with pytest.raises(HwkvError, match=r"scores of layer 7 have shapes .*\[n_query, n_gqa, 3\]"):
            LayerScores.from_cosines(7, WINDOWS, 4, wrong)


# JSON


def test_json_round_trip(scores):
    text = json.dumps(scores.to_dict())
    again = LayerScores.from_dict(json.loads(text))
    assert again == scores and json.dumps(again.to_dict()) == text
    assert (again.layer, again.windows, again.n_sink) == (7, WINDOWS, 4)
    assert again.head_p1 == pytest.approx(scores.head_p1, rel=5.1e-7)
    assert (again.mean != scores.mean).any()  # digits were really dropped


def test_noise_of_the_last_bits_does_not_change_the_text(cosines, scores):
    noisy = LayerScores.from_cosines(7, WINDOWS, 4, [c * (1 + 1e-15) for c in cosines])
    assert (noisy.mean != scores.mean).any() and noisy == scores
    assert LayerScores.from_cosines(7, WINDOWS, 4, [c * (1 + 1e-5) for c in cosines]) != scores
    assert LayerScores.from_cosines(8, WINDOWS, 4, cosines) != scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p1": [[0.5, 0.5, 0.5]]}, r"layer 7: key 'p1' has the shape \(1, 3\), \(2, 3\) expected"),
        ({"head_mean": [[0.5, 0.5]] * 6}, r"layer 7: key 'head_mean' has the shape \(6, 2\), \(6, 3\) expected"),
        (
            {"mean": [[1.0], [1.0, 2.0]]},
            r"scores: key 'mean' is \[\[1.0\], \[1.0, 2.0\]\], a table of numbers, .* expected",
        ),
        ({"mean": "x"}, "scores: key 'mean' is \"x\", a table of numbers, one row per head .* expected"),
        ({"mean": [[1, 2, 3], [1, 2, "3"]]}, r"scores: key 'mean\[1\]\[2\]' is \"3\", a number expected"),
        ({"p2": []}, "scores: key 'p2' is unknown; known are layer, windows, .*head_p5"),
    ],
)
def test_from_dict_refuses(scores, change, message):
    with pytest.raises(HwkvError, match=message):
        LayerScores.from_dict({**scores.to_dict(), **change})


# the choice


@pytest.mark.parametrize(
    ("row", "tau", "window"),
    [
        ([0.5, 0.9, 0.99], 0.9, 16),  # at least tau
        ([0.5, 0.9, 0.99], 0.91, 64),
        ([0.5, 0.9, 0.99], 0.999, None),
        ([0.95, 0.9, 0.99], 0.92, 4),  # not monotone: the shortest that reaches it, whatever longer ones do
        ([0.5, 0.9, 1.0], 1.0, 64),
        ([float("nan")] * 3, 0.5, None),
    ],
)
def test_shortest_window(row, tau, window):
    assert shortest_window(row, WINDOWS, tau) == window


def test_in_trace_error_bound(cosines, scores):
    """|o_w / |o_w| - o / |o||^2 is 2 (1 - cos): over queries and GQA group, the chosen window's mean is at most 2 (1 -
    tau)."""
    held = 0
    for kv_head, seed in enumerate((1, 2)):
        out = outputs(seed).astype(float)
        unit = out / np.linalg.norm(out, axis=-1, keepdims=True)
        squared_error = ((unit[:-1] - unit[-1]) ** 2).sum(-1)
        # eps lifts a cosine by at most eps / |o|^2
        assert squared_error == pytest.approx(2 * (1 - np.moveaxis(cosines[kv_head], -1, 0)), abs=1e-4)
        for tau in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
            window = shortest_window(scores.mean[kv_head], WINDOWS, tau)
            if window is not None:
                chosen = WINDOWS.index(window)
                assert squared_error[chosen].mean() <= 2 * (1 - tau) + 1e-4
                held += chosen == 0 or squared_error[chosen - 1].mean() > 2 * (1 - tau) - 1e-4
    assert held >= 6  # and the bound was near: the next shorter window would have broken it
