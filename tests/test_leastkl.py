"""LeastKL through the real runtime, on the miniature: what is measured, what comes out, interruptions, bad input."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from minilang import needle_prompt

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.base.formats import parse
from hwkv_llamacpp.calibration import trace as traces
from hwkv_llamacpp.calibration.files import to_data
from hwkv_llamacpp.calibration.run import Settings
from hwkv_llamacpp.policy.budget import Budget
from hwkv_llamacpp.runtime import native

try:
    native.library()
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from hwkv_llamacpp.calibration.calibrate import calibrate
from hwkv_llamacpp.calibration.methods.leastkl import LeastKL
from hwkv_llamacpp.calibration.methods.seqcalib import SeqCalib
from hwkv_llamacpp.calibration.sensitivity import Sensitivity, measure
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

MODEL = Path(__file__).parent / "data" / "mini-hybrid-f16.gguf"
OPTIONS = RuntimeOptions(n_ubatch=256, n_gpu_layers=0, n_threads=1)
WINDOWS = (16, 32, 64, 128, 256)
N = 768


@pytest.fixture(scope="module")
def model():
    with Model(MODEL, OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def geometry():
    return ModelGeometry.from_gguf(MODEL)


@pytest.fixture(scope="module")
def trace(model):
    """Facts and questions in the miniature's language; the second halves need far keys."""
    texts = [
        "".join(
            f"{prompt} {value}."
            for prompt, value in (needle_prompt(seed, 350, 250) for seed in range(first, first + 4))
        )
        for first in (0, 4, 8)
    ]
    first, second, third = (model.tokenize(text, add_special=True)[:N] for text in texts)
    return traces.Trace((first, second), (third,), {"text": "needles"})


SETTINGS = Settings(windows=WINDOWS, n_queries=64)
METHOD = LeastKL(tuple(Budget(N, share) for share in (0.25, 0.4, 0.6)))


@pytest.fixture(scope="module")
def run(model, geometry, trace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("leastkl")
    return folder, METHOD.calibrate(model, geometry, trace, folder, SETTINGS, progress=False)


def log_probabilities(model, policy, tokens, positions):
    """Through the grouped cache, token positions of one text."""
    wanted = np.isin(np.arange(len(tokens)), positions)
    with model.context(policy, len(tokens)) as context:
        parts = [context.decode(tokens[i : i + 256], i, wanted[i : i + 256]) for i in range(0, len(tokens), 256)]
    logits = np.concatenate(parts).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


@pytest.mark.parametrize("n_sink", [0, 4])
def test_the_divergence_is_that_of_a_policy_with_one_windowed_head(model, geometry, trace, n_sink):
    """The same measured with the grouped cache, which shares neither the cuts nor the masks."""
    layers, samples = geometry.configurable, traces.sample_positions(trace.sequences, 32, 0)
    found = list(measure(model, layers, trace.sequences, samples, n_sink, n_positions=24, probe=16))
    positions = [np.linspace(len(t) // 2, len(t) - 1, 24, dtype=int) for t in trace.sequences]
    full = [log_probabilities(model, None, t, at) for t, at in zip(trace.sequences, positions)]
    worst = 0.0
    for layer, sensitivity in zip(layers, found, strict=True):
        for head in range(layer.n_head_kv):
            policy = Policy({layer.layer: [16 if i == head else None for i in range(layer.n_head_kv)]}, n_sink)
            kl = np.concatenate(
                [
                    (np.exp(p) * (p - log_probabilities(model, policy, t, at))).sum(1)
                    for p, t, at in zip(full, trace.sequences, positions)
                ]
            ).mean()
            worst = max(worst, abs(kl - sensitivity.kl[head]) / max(kl, 1e-6))
    print(f"KL of {[s.kl.round(5).tolist() for s in found]}, largest relative difference {worst:.1e}")
    assert worst < 0.02 and max(s.kl.max() for s in found) > 0.02


def test_weights():
    """The geometric mean of the head's own and its layer's divergence per squared error."""
    found = Sensitivity(3, np.array([0.4, 0.1, 0.0]), np.array([0.1, 0.1, 0.05]))
    assert found.weights == pytest.approx([np.sqrt(4 * 2), np.sqrt(1 * 2), 0])
    assert (Sensitivity(3, np.zeros(2), np.zeros(2)).weights == 0).all()
    assert Sensitivity(3, np.array([-1e-17, 0.4]), np.array([0.1, 0.1])).weights == pytest.approx(
        [0, np.sqrt(4 * 2)]
    )  # a rounded zero
    assert to_data(parse(Sensitivity, json.loads(json.dumps(to_data(found))), "")) == to_data(found)


def test_budgets_are_met(run, geometry):
    _, records = run
    assert [r.setting["budget"]["retention"] for r in records] == [0.25, 0.4, 0.6]
    for r in records:
        kept = r.policy.retention(N, geometry)
        assert r.setting["budget"]["retention"] - 0.1 < kept <= r.setting["budget"]["retention"] and r.retention[
            N
        ] == round(kept, 6)
        r.policy.check(geometry)
    assert all(r.distortion["kl"] > 0 for r in records)


def test_less_is_lost_than_with_thresholds(model, geometry, tmp_path):
    """At the sizes of SeqCalib's policies, on held-out text; one head of the miniature matters more than its output
    tells."""
    trace = traces.from_files(model, [native.ROOT / "policies" / "mini-hybrid" / "trace.txt"], 2048)
    settings = Settings(windows=(64, 128, 256, 512, 1024), n_queries=256)
    theirs = SeqCalib((0.98, 0.985, 0.99)).calibrate(
        model, geometry, trace, tmp_path / "seqcalib", settings, progress=False
    )
    budgets = tuple(Budget(2048, r.policy.retention(2048, geometry)) for r in theirs)
    ours = LeastKL(budgets).calibrate(model, geometry, trace, tmp_path / "leastkl", settings, progress=False)
    for a, b in zip(theirs, ours, strict=True):
        print(
            f"{a.label} keeps {a.retention[2048]:.3f}: KL {a.distortion['kl']:.4f}; leastkl keeps"
            f" {b.retention[2048]:.3f}: KL {b.distortion['kl']:.4f}"
        )
        assert b.retention[2048] <= a.retention[2048]
    assert np.mean([np.log(b.distortion["kl"] / a.distortion["kl"]) for a, b in zip(theirs, ours)]) < np.log(0.5)


def test_a_run_that_lost_files_gives_the_same(run, model, geometry, trace, tmp_path):
    """As after interruptions: what is there is read, what is missing is measured again, to the same bytes."""
    folder, records = run
    shutil.copytree(folder, tmp_path / "run")
    rng = np.random.default_rng(1)
    for path in sorted((tmp_path / "run").glob("*/*.json")):
        if rng.random() < 0.5:
            path.unlink()
    again = METHOD.calibrate(model, geometry, trace, tmp_path / "run", SETTINGS, progress=False)
    assert [r.policy.to_json() for r in again] == [r.policy.to_json() for r in records]
    assert [r.distortion for r in again] == [r.distortion for r in records]


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (
            "*sensitivity.json",
            '{"layer": 3, "kl": [1], "error": [1], "seconds": 0}',
            "1 KV heads of layer 3; 4 of layer",
        ),
        (
            "*sensitivity.json",
            '{"layer": 3, "kl": [1, 2], "error": [1], "seconds": 0}',
            "kl and error have the shapes (2,) and (1,), one number per KV head expected",
        ),
        (
            "errors-*.json",
            '{"windows": [16, 32, 64, 128, 256], "errors": {"3": [[1]], "7": [[1]]}, "seconds": 0}',
            "errors of layer 3 have the shape (1, 1), (4, 5) expected",
        ),
        (
            "errors-*.json",
            '{"windows": [16], "errors": {"3": [[1]], "7": [[1]]}, "seconds": 0}',
            "errors under the windows [16], [16, 32, 64, 128, 256] expected",
        ),
        ("errors-*.json", '{"errors": {"3": [[1]]}, "seconds": 0}', "key 'windows' is missing"),
        (
            "errors-*.json",
            '{"windows": [16, 32, 64, 128, 256], "errors": {"3": [[1, 1, 1, 1, 1]]}, "seconds": 0}',
            "errors of layer 3 have the shape (1, 5), (4, 5) expected",
        ),
        (
            "errors-*.json",
            json.dumps({"windows": [16, 32, 64, 128, 256], "errors": {"3": [[1] * 5] * 4}, "seconds": 0}),
            "key 'errors.7' is missing",
        ),
        ("errors-*.json", '{"windows": [16], "errors": {"3": 1}, "seconds": 0}', "key 'errors.3' is 1, a table of"),
        ("*sensitivity.json", '{"layer": 3, "kl": [1], "error": ["x"], "seconds": 0}', 'is "x", a number expected'),
        ("*sensitivity.json", '{"layer": 3, "kl": [1], "eror": [1], "seconds": 0}', "key 'eror' is unknown; known are"),
        ("errors-*.json", "{", "Expecting property name"),
    ],
)
def test_foreign_files_are_named(run, model, geometry, trace, tmp_path, pattern, text, message):
    shutil.copytree(run[0], tmp_path / "run")
    for path in (tmp_path / "run" / "layers").glob(pattern):
        path.write_text(text)
    with pytest.raises(HwkvError, match=re.escape(message)) as caught:
        METHOD.calibrate(model, geometry, trace, tmp_path / "run", SETTINGS, progress=False)
    assert str(tmp_path / "run" / "layers") in str(caught.value) and "remove it" in str(caught.value)


def test_duo_from_a_run(run, hwkv, geometry, tmp_path):
    """The head that the miniature's answers hang on is the first to be full."""
    words = ["policy", "make", "duo", MODEL, "--run", run[0], "--retention", 0.3, "-c", N, "--sink", 0]
    code, _, err = hwkv(*words, "--window", 16, "-o", tmp_path / "duo.json")
    assert code == 0, err
    policy = Policy.load(tmp_path / "duo.json")
    assert {w for row in policy.layers.values() for w in row} == {None, 16} and policy.layers[7][1] is None
    for changed, message in (
        (["--window", 17], "--window is 17; the run in"),
        (["--window", 16, "--sink", 1], "no finished run of hwkv calibrate --method leastkl with --sink 1"),
    ):
        code, _, err = hwkv(*words, "-o", tmp_path / "other.json", *changed)
        assert code == 1 and message in err and not (tmp_path / "other.json").exists()


def test_duo_refuses_a_run_of_another_model(run, hwkv, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run[0], other)
    held = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**held, "model_fingerprint": "ab"}))
    code, _, err = hwkv(
        "policy", "make", "duo", MODEL, "--run", other, "--retention", 0.3, "-c", N, "--sink", 0, "--window", 16
    )
    assert code == 1 and f"{other}: a run of another model: its model_fingerprint is ab" in err


def test_another_method_needs_another_folder(run, model, geometry, trace):
    with pytest.raises(HwkvError, match="holds another calibration: its method is leastkl, now it is seqcalib"):
        SeqCalib().calibrate(model, geometry, trace, run[0], SETTINGS, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.5, "budget_bytes": 5}, "at most one can select"),
        (
            {"method": LeastKL(probe_tokens=64)},
            "sensitivities are measured on 64 tokens of each trace, more than 64 expected",
        ),
        ({"budget": 0.001}, "not even a window of 256 tokens for every KV head fits"),
        ({"held_out_text": ["x.txt"]}, "held-out text without text to calibrate on"),
        ({"method": "best"}, "no method is called 'best'; there are leastkl, seqcalib"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    with pytest.raises(HwkvError, match=re.escape(message)):
        calibrate(
            MODEL,
            tmp_path / "run",
            **{"method": "leastkl", "n_tokens": 512, "options": OPTIONS, "progress": False, **arguments},
        )
