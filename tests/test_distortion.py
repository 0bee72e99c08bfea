"""Distortion against what it is defined as, from logits of the runtime's other entrance."""

import tempfile

import numpy as np
import pytest
from minilang import needle_prompt
from reference.random_models import write_llama

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.gguf.file import GGUFFile
from hwkv_llamacpp.runtime import native

try:
    native.library()
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from parity_runtime import Runtime

from hwkv_llamacpp.calibration.distortion import DistortionMeter
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

OPTIONS = RuntimeOptions(64, n_gpu_layers=0, n_threads=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Path of random weights, peaked attention, two layers of 4 KV heads."""
    path = tmp_path_factory.mktemp("random") / "llama.gguf"
    write_llama(path, seed=1, n_layer=2)
    return path


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 256, n).astype(np.int32) for n in (300, 101)]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def directly(path, policy, texts):
    """(kl, same top token, nll, nll with full KV) of every position in the second halves."""
    values = []
    for tokens in texts:
        at = np.arange(len(tokens) // 2, len(tokens) - 1)
        logs = []
        for p in (None, policy):
            with Runtime(path, p, n_threads=1) as runtime, runtime.context(512, 64, "f16", True) as context:
                logs.append(log_softmax(context.run(tokens, at, len(tokens))))
        full, cut = logs
        following = np.asarray(tokens)[at + 1]
        kl, same = (np.exp(full) * (full - cut)).sum(1), full.argmax(1) == cut.argmax(1)
        values.append([kl, same, *(-log[range(len(at)), following] for log in (cut, full))])
    return [np.concatenate(x) for x in zip(*values)]


def test_equals_the_definition(dense, texts):
    policy = Policy({0: (16, None, 64, 17), 1: (None, 16, 16, 100)})
    kl, same, nll, nll_full = directly(dense, policy, texts)
    with Model(dense, OPTIONS) as model, DistortionMeter(model, texts) as meter:
        d = meter.measure(policy)
    assert (d.n_tokens, d.n_positions) == (401, len(kl)) == (401, 149 + 50)
    assert d.kl == pytest.approx(kl.mean(), rel=1e-3) and d.kl > 0.1
    assert d.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    assert d.kl_stderr == pytest.approx(kl.std() / np.sqrt(len(kl)), rel=1e-3)
    assert d.top1 == pytest.approx(same.mean(), abs=1 / len(kl)) and d.top1 < 0.9
    assert d.nll == pytest.approx(nll.mean(), rel=1e-4) and d.nll_full == pytest.approx(nll_full.mean(), rel=1e-4)
    assert d.nll != pytest.approx(d.nll_full, rel=1e-3)


def test_nothing_is_lost_where_nothing_is_cut(dense, texts):
    """All full is full KV, bit for bit; windows beyond every history are so up to the order of sums."""
    geometry = ModelGeometry.from_gguf(dense)
    with Model(dense, OPTIONS) as model, DistortionMeter(model, texts) as meter:
        full = meter.measure(Policy())
        assert (full.kl, full.kl_p99, full.top1, full.nll) == (0, 0, 1, full.nll_full)
        beyond = meter.measure(uniform(geometry, 299))  # 300 would be full
        assert abs(beyond.kl) < 1e-5 and beyond.top1 == 1
        assert meter.measure(uniform(geometry, 16)).kl > meter.measure(uniform(geometry, 128)).kl > 0.01


def test_measuring_again_gives_the_same(dense, texts):
    """Whatever was measured between, and by another meter."""
    a, b = Policy({0: (16,) * 4}), Policy({1: (40,) * 4})
    with Model(dense, OPTIONS) as model:
        with DistortionMeter(model, texts) as meter:
            first = [meter.measure(p) for p in (a, b, a)]
        with DistortionMeter(model, texts) as meter:
            second = [meter.measure(p) for p in (b, a)]
    assert first[0] == first[2] == second[1] and first[1] == second[0] and first[0] != first[1]


def test_positions_are_spread_over_the_second_halves(dense, texts):
    with Model(dense, OPTIONS) as model, DistortionMeter(model, texts, n_positions=60) as meter:
        long, short = meter.positions
        assert (len(long), len(short)) == (60, 50)
        assert (
            long[0] == 150 and long[-1] <= 298 and set(np.diff(long)) <= {2, 3} and (short == np.arange(50, 100)).all()
        )
        assert (meter.targets == np.concatenate([texts[0][long + 1], texts[1][short + 1]])).all()
        assert meter.measure(Policy({0: (16,) * 4})).n_positions == 110


def test_a_policy_that_cuts_the_needles_is_worse(mini_hybrid):
    """On trained weights: the one head that finds far facts, windowed, costs more than all the others together."""
    with Model(mini_hybrid, OPTIONS) as model:
        pieces = [f"{prompt} {value}." for prompt, value in (needle_prompt(seed, 200, 150) for seed in range(6))]
        texts = [model.tokenize("".join(half), add_special=True) for half in (pieces[:3], pieces[3:])]
        with DistortionMeter(model, texts) as meter:
            without, others = (
                meter.measure(Policy({3: (32,) * 4, 7: row})) for row in ((32, 32, 32, 32), (32, None, 32, 32))
            )
    print(f"KL {without.kl:.4f} with 7.1 windowed, {others.kl:.4f} with it full")
    assert without.kl > 3 * others.kl and without.nll > others.nll


def test_logits_that_are_no_numbers_are_refused(tmp_path, texts):
    path = tmp_path / "llama.gguf"
    write_llama(path, seed=1)
    with GGUFFile(path) as file:
        (at,) = (file.data_start + t.offset for t in file.tensors if t.name == "output.weight")
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(np.float32(np.nan).tobytes())
    with Model(path, OPTIONS) as model, DistortionMeter(model, texts) as meter:
        with pytest.raises(HwkvError, match="the logits on the held-out text hold values that are no numbers"):
            meter.measure(Policy({0: (16,) * 4}))


def test_short_texts_are_refused(dense):
    with (
        Model(dense, OPTIONS) as model,
        pytest.raises(HwkvError, match="a held-out text has 3 tokens, at least 4 expected"),
    ):
        DistortionMeter(model, [np.arange(10, dtype=np.int32), np.arange(3, dtype=np.int32)])


def test_a_full_disk_is_a_sentence(dense, texts, tmpfs, monkeypatch):
    """And the meter can be used once there is room."""
    policy = Policy({0: (16,) * 4})
    with Model(dense, OPTIONS) as model, DistortionMeter(model, texts) as meter:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmpfs("64k")))
            with pytest.raises(
                HwkvError, match="cannot write the distributions with full KV, 203,776 bytes: No space left"
            ):
                meter.measure(policy)
        assert meter.measure(policy).kl > 0
