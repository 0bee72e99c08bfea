"""SeqCalib through the real runtime: against an independent implementation, under faults, kills and bad input."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from f32 import f32_copy
from minilang import needle_prompt
from reference import calibration as independent
from reference.random_models import write_llama

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.calibration import trace as traces
from hwkv_llamacpp.calibration.methods.seqcalib import SeqCalib, file_name
from hwkv_llamacpp.calibration.run import Settings
from hwkv_llamacpp.calibration.scores import LayerScores
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.gguf.file import GGUFFile
from hwkv_llamacpp.runtime import native

try:
    native.library()
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from hwkv_llamacpp.calibration.layerwise import Layerwise
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions


def options(**changes):
    return RuntimeOptions(**{"n_ubatch": 256, "n_gpu_layers": 0, "n_threads": 2, **changes})


def needles(n_prompts, first=0):
    """Facts and questions in the miniature's language; its second halves need far keys."""
    return "".join(
        f"{prompt} {value}."
        for prompt, value in (needle_prompt(seed, 300, 200) for seed in range(first, first + n_prompts))
    )


def saved_scores(folder, geometry, policy):
    """{layer: LayerScores} that a run kept, each under the policy's windows below it."""
    rows = tuple(policy.row(layer) for layer in geometry.configurable)
    layers = Path(folder) / "layers"
    paths = [layers / file_name(geometry.configurable, policy.n_sink, rows[:i]) for i in range(len(rows))]
    return {s.layer: s for s in (LayerScores.from_dict(json.loads(path.read_text())["scores"]) for path in paths)}


# against an implementation that shares no code

SHORT = 0.01  # a threshold that most of the shortest windows reach


# Each case: model, trace, windows, n_sink, queries, a threshold, and how near scores must be. Weights are F32 on both
# sides; the runtime rounds K and V to F16, which moved scores by 3.4e-4 in SmolLM2 and by 6e-6 in the miniature.


def smollm2_case():
    path = f32_copy(testmodels.smollm2())
    with Model(path, options()) as model:
        trace = traces.default(model, 384)
    return (
        path,
        traces.Trace(trace.sequences[:1], (trace.held_out[0][:32],), trace.source),
        (32, 64, 128),
        0,
        64,
        0.95,
        1e-3,
    )


def hybrid_case():
    path = f32_copy(Path(__file__).parent / "data" / "mini-hybrid-f16.gguf")
    with Model(path, options()) as model:
        tokens = model.tokenize(needles(4), add_special=True)
    return (
        path,
        traces.Trace((tokens[:300], tokens[300:600]), (tokens[600:632],), {}),
        (8, 16, 32, 64, 128),
        4,
        64,
        0.999,
        1e-4,
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(smollm2_case, marks=pytest.mark.long, id="smollm2"),
        pytest.param(hybrid_case, id="mini-hybrid"),
    ],
)
def compared(request, tmp_path_factory):
    """Two thresholds calibrated, and what the independent implementation scores under their policies and with full
    history."""
    path, trace, windows, n_sink, n_queries, tau, tolerance = request.param()
    folder = tmp_path_factory.mktemp("run")
    geometry, settings = (ModelGeometry.from_gguf(path), Settings((n_sink,), windows, n_queries))
    with Model(path, options()) as model:
        records = SeqCalib((tau, SHORT)).calibrate(model, geometry, trace, folder, settings, progress=False)
    truth = reference.load(str(path))
    positions = traces.sample_positions(trace.sequences, n_queries, settings.seed)

    def expected(policy):
        return independent.layer_scores(
            truth, trace.sequences, positions, windows, {x.layer: policy.row(x) for x in geometry.configurable}, n_sink
        )

    return SimpleNamespace(
        windows=windows,
        geometry=geometry,
        tolerance=tolerance,
        taus={"usual": tau, "short": SHORT},
        policies={r.setting["tau"]: r.policy for r in records},
        actual={r.setting["tau"]: saved_scores(folder, geometry, r.policy) for r in records},
        expected={**{r.setting["tau"]: expected(r.policy) for r in records}, "full": expected(Policy())},
    )


@pytest.mark.parametrize("name", ["usual", "short"])
def test_scores_are_those_of_the_independent_implementation(compared, name):
    tau = compared.taus[name]
    differences = [
        np.abs(scores.mean - compared.expected[tau][layer]).max() for layer, scores in compared.actual[tau].items()
    ]
    print(f"largest difference of a score in {len(differences)} layers: {max(differences):.1e}")
    assert len(differences) == len(compared.geometry.configurable) and max(differences) <= compared.tolerance


@pytest.mark.parametrize("name", ["usual", "short"])
def test_the_policy_is_that_of_the_independent_implementation(compared, name):
    """Except where a score lies so near to the threshold that rounding decides."""
    tau = compared.taus[name]
    policy, near, heads = compared.policies[tau], [], 0
    for layer in compared.geometry.configurable:
        for head, window in enumerate(policy.row(layer)):
            heads += 1
            row = compared.expected[tau][layer.layer][head]
            theirs = independent.shortest(row, compared.windows, tau)
            if theirs != window:  # the shorter of the two is the one that was doubtful
                near.append(abs(row[compared.windows.index(min(w for w in (theirs, window) if w is not None))] - tau))
    print(f"{heads} KV heads, {len(near)} of them at the threshold: {near}")
    assert all(distance <= compared.tolerance for distance in near) and len(near) <= heads / 10
    chosen = [w for row in policy.layers.values() for w in row]
    print(f"{chosen.count(compared.windows[0])} with the shortest window, {len(set(chosen))} different windows")
    assert (
        chosen.count(compared.windows[0]) > heads / 2 if tau == SHORT else len(set(chosen)) > 1
    )  # there was something to choose


def test_sequential_is_sequential(compared):
    """Under short windows below, the upper layers' scores are others than with full history below; the first layer's
    are the same."""
    short, full = compared.actual[SHORT], compared.expected["full"]
    moved = [np.abs(short[x.layer].mean - full[x.layer]).max() for x in compared.geometry.configurable]
    print("moved by", " ".join(f"{x:.1e}" for x in moved))
    assert moved[0] <= compared.tolerance and min(moved[1:]) > 5 * compared.tolerance


# faults


@pytest.fixture(scope="module")
def mini():
    """(path, geometry, trace, settings): a calibration of the mini hybrid that takes a second."""
    path = Path(__file__).parent / "data" / "mini-hybrid-f16.gguf"
    with Model(path, options()) as model:
        tokens = model.tokenize(needles(3), add_special=True)
    trace = traces.Trace((tokens[:200], tokens[200:400]), (tokens[400:500],), {})
    return path, ModelGeometry.from_gguf(path), trace, Settings(windows=(8, 32, 100), n_queries=32)


def run_mini(mini, folder, **changes):
    path, geometry, trace, settings = mini
    with Model(path, options(**changes)) as model:
        return SeqCalib((0.9, 0.999)).calibrate(model, geometry, trace, folder, settings, progress=False)


@pytest.mark.parametrize(("type_kv", "layer"), [("f16", 3), ("f16", 7), ("q8_0", 7)])
def test_exchanged_heads_stop_the_calibration(mini, tmp_path, monkeypatch, type_kv, layer):
    """And stop it once more when it is run again: a fault leaves no scores behind."""
    queries = Layerwise.queries

    def exchanged(self, at):
        captured = queries(self, at)
        if at.layer == layer:
            for q in captured:
                q[:, [0, 7]] = q[:, [7, 0]]
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(Layerwise, "queries", exchanged)
        for _ in range(2):
            with pytest.raises(
                HwkvError,
                match=f"layer {layer}: the replayed attention output is not the runtime's: "
                "relative squared error [0-9.]+",
            ):
                run_mini(mini, tmp_path / "run", type_k=type_kv, type_v=type_kv)
    assert {path.name[:3] for path in (tmp_path / "run" / "layers").iterdir()} == ({"003"} if layer == 7 else set())
    after = run_mini(mini, tmp_path / "run", type_k=type_kv, type_v=type_kv)
    fresh = run_mini(mini, tmp_path / "fresh", type_k=type_kv, type_v=type_kv)
    assert [r.policy for r in after] == [r.policy for r in fresh]


def test_values_that_are_no_numbers_stop_the_calibration(tmp_path):
    """One NaN in the V projection of the second layer."""
    path = tmp_path / "llama.gguf"
    write_llama(path, seed=1, n_layer=3)
    with GGUFFile(path) as file:
        (tensor,) = (t for t in file.tensors if t.name == "blk.1.attn_v.weight")
        at = file.data_start + tensor.offset
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(np.float32(np.nan).tobytes())
    rng = np.random.default_rng(1)
    trace = traces.Trace(
        (rng.integers(0, 256, 100).astype(np.int32),), (rng.integers(0, 256, 40).astype(np.int32),), {}
    )
    with Model(path, options(n_threads=1)) as model, np.errstate(invalid="ignore"):
        with pytest.raises(
            HwkvError, match="layer 1: the attention output on the trace holds values that are no numbers"
        ):
            SeqCalib((0.9,)).calibrate(
                model, ModelGeometry.from_gguf(path), trace, tmp_path / "run", Settings(windows=(16,)), progress=False
            )
    assert [path.name[:3] for path in (tmp_path / "run" / "layers").iterdir()] == ["000"]


# the command, on the mini hybrid

TAUS = (0.9, 0.98, 0.995, 0.999)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "needles.txt"
    path.write_text(needles(7))
    return path


@pytest.fixture(scope="module")
def command(text):
    """command(policy path, ...): the words of a calibration that takes a few seconds."""
    path = Path(__file__).parent / "data" / "mini-hybrid-f16.gguf"

    def words(output, *more):
        return [
            str(w)
            for w in (
                "calibrate",
                path,
                "-o",
                output,
                "--text",
                text,
                "--trace-tokens",
                512,
                "--windows",
                "8,16,32,64,128,256",
                "--taus",
                ",".join(map(str, TAUS)),
                "--queries",
                64,
                "-ub",
                128,
                "-t",
                1,
                "-ngl",
                0,
                "-c",
                4096,
                "--sink",
                0,
                *more,
            )
        ]

    return words


def start(words):
    return subprocess.Popen(
        [sys.executable, "-m", "hwkv_llamacpp", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    """Path of the policy of a calibration that nothing disturbed; its run lies beside it."""
    policy = tmp_path_factory.mktemp("undisturbed") / "policy.json"
    process = start(command(policy))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return policy


def records(run):
    """{(tau, n_sink): record as a dict}."""
    return {
        (data["setting"]["tau"], data["n_sink"]): data
        for data in (
            json.loads(path.read_text()) for path in (run / "records").iterdir() if not path.name.startswith(".")
        )
    }


def test_a_higher_threshold_gives_the_first_layer_no_shorter_windows(undisturbed):
    rows = [
        Policy.from_json(json.dumps(records(undisturbed.with_suffix(".calib"))[tau, 0]["policy"])).layers[3]
        for tau in TAUS
    ]
    lengths = np.array([[np.inf if w is None else w for w in row] for row in rows])
    print(rows)
    assert (np.diff(lengths, axis=0) >= 0).all() and (lengths[0] < lengths[-1]).any()


def test_recorded_retention_is_that_of_the_policy(undisturbed):
    for record in records(undisturbed.with_suffix(".calib")).values():
        assert set(record["retention"]) == {"512", "4096"}
        for n, share in record["retention"].items():
            n, windows = int(n), [w for layer in record["policy"]["layers"] for w in layer["windows"]]
            assert len(windows) == 8
            assert share == pytest.approx(sum(n if w == "full" else min(n, w) for w in windows) / (8 * n), abs=1e-6)


def test_provenance_tells_how_to_repeat_it(undisturbed, text):
    path = Path(__file__).parent / "data" / "mini-hybrid-f16.gguf"
    policy = Policy.load(undisturbed)
    said = policy.provenance
    assert (
        said["method"] == "seqcalib"
        and said["tau"] in TAUS
        and said["model_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    )
    with Model(path, options()) as model:
        trace = traces.from_files(model, [text], said["n_ctx"])
    assert (said["trace_sha256"], said["held_out_sha256"], said["trace"]) == (
        trace.sha256,
        trace.held_out_sha256,
        trace.source,
    )
    assert (said["windows"], said["n_queries"], said["seed"]) == ([8, 16, 32, 64, 128, 256], 64, 0)
    assert (said["type_k"], said["type_v"], said["n_ubatch"]) == ("f16", "f16", 128)
    assert policy.model == ModelGeometry.from_gguf(path).describe()


def test_provenance_has_the_windows_that_were_tried(hwkv, mini_hybrid, tmp_path):
    """By default they leave room for the sinks, whatever their numbers; one run has them all, and selects among
    them."""
    words = [
        "calibrate",
        mini_hybrid,
        "-o",
        tmp_path / "p.v2",
        "--trace-tokens",
        512,
        "--taus",
        "0.9,0.99",
        "--queries",
        16,
        "-ub",
        256,
        "-t",
        1,
        "--sink",
        0,
        "--sink",
        4,
        "-c",
        4096,
    ]
    code, out, err = hwkv(*words, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert [(r["n_sink"], r["setting"]["tau"], r["policy"]["provenance"]["windows"]) for r in data["records"]] == [
        (0, 0.9, [256]),
        (0, 0.99, [256]),
        (4, 0.9, [252]),
        (4, 0.99, [252]),
    ]
    best = min((r for r in data["records"] if r["retention"]["4096"] <= 0.7), key=lambda r: r["distortion"]["kl"])
    assert (data["selected"]["n_sink"], data["selected"]["tau"]) == (best["n_sink"], best["setting"]["tau"])
    assert Policy.load(tmp_path / "p.v2").n_sink == best["n_sink"]
    assert {path.name for path in tmp_path.iterdir()} == {"p.v2", "p.v2.calib"} and (
        tmp_path / "p.v2.calib" / "pareto.png"
    ).stat().st_size > 1000


def test_the_policy_passes_the_check_and_serves(undisturbed, hwkv, mini_hybrid):
    from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

    code, _, err = hwkv("policy", "check", mini_hybrid, undisturbed)
    assert (code, err) == (0, "")
    geometry = ModelGeometry.from_gguf(mini_hybrid)
    with LlamaServer(
        ServerOptions(mini_hybrid, undisturbed, n_ctx=1024, n_ubatch=128, n_parallel=1, n_threads=1, n_gpu_layers=0)
    ) as server:
        assert server.props()["hwkv"]["fingerprint"] == Policy.load(undisturbed).fingerprint(geometry.n_layer)
        assert server.post("/completion", {"prompt": needles(1), "n_predict": 4})["tokens_predicted"] == 4


def test_selection_from_a_finished_run(undisturbed, command, hwkv, tmp_path):
    """Another budget or threshold reads what is there: same records, and no new calibration."""
    run = undisturbed.with_suffix(".calib")
    before = {
        path: path.stat().st_mtime_ns for path in (*run.glob("layers/*"), *run.glob("records/*"), run / "run.json")
    }
    cases = [(("--tau", 0.98), 0.98), (("--budget", 1), None), (("--budget-bytes", "1GiB"), None)]
    for i, (flags, chosen) in enumerate(cases):
        code, out, err = hwkv(*command(tmp_path / f"{i}.json", "--run", run, "--json", *flags))
        assert (code, err) == (0, "")
        selected = json.loads(out)["selected"]
        held = records(run)
        if chosen is None:  # all fit: the least KL
            chosen = min(held.values(), key=lambda r: r["distortion"]["kl"])["setting"]["tau"]
        assert selected == {"tau": chosen, "n_sink": 0}
        assert Policy.load(tmp_path / f"{i}.json") == Policy.from_json(json.dumps(held[chosen, 0]["policy"]))
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.long
def test_killed_at_random_and_run_again(undisturbed, command, tmp_path):
    """SIGKILL at random moments, each after something new was kept; the last run ends with the bytes of the undisturbed
    one.

    On a machine that is quick after a slow moment, one more file and a pause may be all that was left: then the policy
    is there.
    """
    rng = np.random.default_rng()
    policy, run = tmp_path / "policy.json", tmp_path / "policy.calib"

    def kept():
        return sum(
            1
            for pattern in ("run.json", "layers/*", "records/*")
            for path in run.glob(pattern)
            if not path.name.startswith(".")
        )

    moments = []
    for n_new in (0, 1, 1, 2, 2):
        process, goal, wait = start(command(policy)), kept() + n_new, rng.uniform(0, 0.4)
        deadline = time.monotonic() + 120
        while kept() < goal and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(wait)
        process.kill()
        process.communicate()
        moments.append((kept(), round(wait, 3), process.returncode))
        if policy.exists():
            policy.unlink()
            break
    print("kept, waited, code:", moments)
    killed = [n for n, _, code in moments if code == -signal.SIGKILL]
    assert len(killed) >= len(moments) - 1 and len(set(killed)) >= 3  # at different stages
    process = start(command(policy))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err

    expected_run = undisturbed.with_suffix(".calib")
    assert policy.read_bytes() == undisturbed.read_bytes()
    assert (run / "run.json").read_bytes() == (expected_run / "run.json").read_bytes()
    for folder in ("layers", "records"):
        names = sorted(path.name for path in (run / folder).iterdir() if not path.name.startswith(".hwkv-"))
        assert names == sorted(path.name for path in (expected_run / folder).iterdir())
        for name in names:
            ours, theirs = (json.loads((where / folder / name).read_text()) for where in (run, expected_run))
            assert ours.pop("seconds") > 0 and theirs.pop("seconds") > 0
            assert ours == theirs, name


# bad input, through the command


def refused(hwkv, words, *parts, code=1):
    """One sentence that holds all of these parts, and nothing is written."""
    output = Path(words[words.index("-o") + 1])
    before = output.read_bytes() if output.is_file() else None
    actual, out, err = hwkv(*words)
    assert (actual, out) == (code, ""), err
    last = err.splitlines()[-1]
    assert ("error: " if code == 1 else "hwkv calibrate: error: ") in last and err.count("rror:") == 1, err
    assert code == 2 or len(err.splitlines()) == 1, err
    assert all(part in last for part in parts), err
    assert (output.read_bytes() if output.is_file() else None) == before


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("the file is empty, text expected",)),
        (b" \n\t\n", ("the file is empty, text expected",)),
        (b"GGUF\x00\x01\x02 text", ("not text: it holds control characters",)),
        (b"\xff\xfe\x00text", ("not text: byte 0 is not UTF-8",)),
        (
            b"the old man ran to the sea. " * 10,
            (" tokens, at least 1024, half to calibrate on and half to measure on, expected", "--trace-tokens"),
        ),
        (None, ("cannot read: No such file",)),
        (Path, ("cannot read: Is a directory",)),
    ],
)
def test_texts_that_are_refused(hwkv, command, tmp_path, content, parts):
    path = tmp_path / "text.txt"
    if content is Path:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    words = command(tmp_path / "p.json", "--json")
    words[words.index("--text") + 1] = str(path)
    refused(hwkv, words, f"{path}: ", *parts)
    refused(
        hwkv,
        command(tmp_path / "p.json", "--json", "--held-out-text", path),
        f"{path}: ",
        parts[0].split(", half")[0].replace("1024", "256"),
    )


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (("--taus", "0"), 2, "--taus: '0' is not a threshold above 0 and up to 1"),
        (("--taus", "0.9,1.01"), 2, "'1.01' is not a threshold"),
        (("--taus", "-0.5"), 2, "--taus"),
        (("--taus", "nan"), 2, "'nan' is not a threshold"),
        (("--taus", "0.9,"), 2, "'' is not a threshold"),
        (("--tau", "0"), 2, "'0' is not a threshold"),
        (("--tau", "0.5"), 1, "tau 0.5 is not calibrated; the thresholds are 0.9, 0.98, 0.995, 0.999"),
        (("--tau", "0.9", "--budget", "0.5"), 1, "--tau selects by itself: it does not go with --budget"),
        (("--budget", "0"), 2, "'0' is not a share above 0 and up to 1"),
        (("--budget", "70%"), 2, "'70%' is not a share"),
        (("--budget-bytes", "4 pounds"), 2, "'4 pounds' is not a size such as 24GiB"),
        (("--budget-bytes", "4"), 2, "'4' is 4 bytes: a size with its unit expected"),
        (("--method", "leastkl", "--taus", "0.9"), 1, "--taus is an option of the method seqcalib, not of leastkl"),
        (("--probe-tokens", "64"), 1, "--probe-tokens is an option of the method leastkl, not of seqcalib"),
        (("--budget-bytes", "infGiB"), 2, "'infGiB' is not a size"),
        (("--windows", "0"), 2, "'0' is not a number from 1"),
        (("--windows", "64,full"), 2, "'full' is not a number"),
        (("--windows", "64,257"), 1, "window 257 cannot be judged on a trace of 512 tokens: 1 to 256 expected"),
        (
            ("--trace-tokens", "5000"),
            1,
            "a trace of 5000 tokens is asked for, but the model was trained with a context of 4096",
        ),
        (("--trace-tokens", "1"), 1, "cannot be judged on a trace of 1 tokens"),
        (("--queries", "0"), 2, "'0' is not a number from 1"),
        (("--sink", "-1"), 2, "--sink"),
        (("--seed", "-1"), 2, "--seed"),
        (("-ctk", "q9_0"), 2, "invalid choice: 'q9_0'"),
    ],
)
def test_options_that_are_refused(hwkv, command, tmp_path, flags, code, part):
    refused(hwkv, command(tmp_path / "p.json", "--json", *flags), part, code=code)


def test_default_windows_need_a_trace(hwkv, mini_hybrid, tmp_path):
    words = ["calibrate", mini_hybrid, "-o", tmp_path / "p.json", "--trace-tokens", 511]
    refused(hwkv, words, "the trace has 511 tokens, too few for the default windows: at least 512 expected")


def test_models_that_are_refused(hwkv, command, random_models, tmp_path):
    no_vocabulary = tmp_path / "no-vocabulary.gguf"
    write_llama(no_vocabulary, seed=1)
    (tmp_path / "text.gguf").write_text("not a model")
    named = {path.stem: path for path in random_models}
    for model, part in (
        (named["mamba-dense"], "recurrent"),
        (named["lfm2-dense"], "no layer with global attention"),
        (named["bloom-dense"], "ALiBi"),
        (no_vocabulary, "has no tokenizer"),
        (tmp_path / "none.gguf", "No such file"),
        (tmp_path / "text.gguf", "not a GGUF"),
    ):
        words = command(tmp_path / "p.json", "--json")
        words[1] = str(model)
        words[words.index("--trace-tokens") + 1], words[words.index("--windows") + 1] = "256", "16"
        refused(hwkv, words, part)


def test_outputs_that_cannot_be_written(hwkv, command, tmp_path, tmpfs):
    """Before anything is calibrated."""
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    locked = tmpfs("1m", read_only=True)
    for output, run, parts in (
        ("there.json", "run", ("there.json: exists already; --force replaces it",)),
        ("folder", "run", ("folder: cannot write: it is a folder",)),
        ("none/p.json", "run", ("none/p.json: cannot write", "none is no folder")),
        ("there.json/p.json", "run", ("there.json/p.json: cannot write",)),
        (locked / "p.json", "run", ("p.json: cannot write", "is read-only")),
        ("p.json", "there.json", ("there.json: cannot write",)),
        ("p.json", "there.json/run", ("cannot write: Not a directory",)),
        ("p.json", locked / "run", ("cannot write: Read-only file system",)),
    ):
        refused(hwkv, command(tmp_path / output, "--json", "--run", tmp_path / run), *parts)
        assert not (tmp_path / "run").exists()


def test_a_full_disk_is_a_sentence(hwkv, command, tmp_path, tmpfs):
    code, out, err = hwkv(*command(tmp_path / "p.json", "--json", "--run", tmpfs("8k") / "run"))
    assert (
        (code, out) == (1, "")
        and err.startswith("error: ")
        and "the disk is full" in err
        and len(err.splitlines()) == 1
    ), err
    assert not (tmp_path / "p.json").exists()


def test_runs_that_do_not_fit(hwkv, command, undisturbed, tmp_path):
    """Another calibration's folder, and files that were broken since."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed.with_suffix(".calib"), run)
    words = command(tmp_path / "p.json", "--json", "--run", run)
    for flag, value, key in (
        ("--queries", 63, "n_queries is 64, now it is 63"),
        ("--windows", "8,16", "windows is [8, 16, 32, 64, 128, 256], now it is [8, 16]"),
        ("--seed", 1, "seed is 0, now it is 1"),
        ("-ctk", "q8_0", "type_k is f16, now it is q8_0"),
        ("-ub", 64, "n_ubatch is 128, now it is 64"),
    ):
        refused(
            hwkv,
            [*words, flag, str(value)],
            f"{run}: holds another calibration: its {key}",
            "remove the folder or name another one with --run",
        )
    nearest = "no record fits the budget: the nearest, tau 0."
    refused(hwkv, [*words, "--budget", "0.001"], nearest, "at most 0.001 expected")

    for file in ("run.json", f"layers/{next(run.glob('layers/003*')).name}", "records/sink0-tau0.9.json"):
        path = run / file
        whole = path.read_bytes()
        no_number = re.sub(rb'("mean": \[\[|"mean_score": )[0-9.]+', rb"\1NaN", whole)
        for broken in (
            b"",
            whole[: len(whole) // 2],
            b"\xff\xfe",
            b"[1]",
            b"null",
            b"{}",
            *([no_number] if no_number != whole else []),
        ):
            path.write_bytes(broken)
            advice = (
                "remove the folder or name another one" if file == "run.json" else "remove it, and it is made again"
            )
            refused(hwkv, words, f"{path}: not a file of this calibration: ", advice)
        path.write_bytes(whole)
    assert hwkv(*words)[0] == 0
