"""Layerwise: what is captured at each cut is what the runtime attends, and what comes out is what the grouped cache
computes.

The attention output that the runtime gives under random windows is held against the replay of the captured Q, K and V.
Both see the same rounded K and V, so only arithmetic is left. The CPU's FlashAttention kernel for whole tiles of
queries adds up in F32: 5e-14 was seen. The one for fewer queries than a tile adds up V in F16 (2^-11 squared is 2e-7):
2e-6 was seen, and 5e-6 where random weights had made a head's V nearly the same at all positions, so that the roundings
do not cancel. For a quantised K both round Q to 8 bits, which
grows with the logits: 3e-7 was seen on the miniature, 1.3e-4 on Gemma. The negative controls show what that resolves:
one window off by one moves the output at least 50 times as far.

Errors are squared differences over the squared norm of what is expected, summed over the queries of a layer.
"""

import gc
import os
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest
from minilang import needle_prompt
from reference.random_models import write_llama, write_qwen35

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.calibration.replay import replay
from hwkv_llamacpp.runtime import native

try:
    native.library()
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from hwkv_llamacpp.calibration.layerwise import END, START, Layerwise
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

SINKS = [0, 4]  # numbers of first positions that every window sees
TOLERANCE = 2e-6
TOLERANCE_RANDOM = 1e-5
TILES = 1e-11  # K and V as F16, one sequence, whole ubatches
NOTICED = 50
NO_FLASH_ATTENTION = {"grok-moe"}  # llama.cpp turns it off there


def options(n_ubatch=64, type_k="f16", type_v="f16"):
    return RuntimeOptions(
        n_ubatch, type_k, type_v, n_gpu_layers=int(os.environ.get("HWKV_TEST_GPU_LAYERS", "0")), n_threads=1
    )


def samples_of(traces, rng, n=16):
    """Random positions of each trace, the first and the last among them."""
    return [np.unique([0, len(t) - 1, *rng.integers(0, len(t), n)]) for t in traces]


def random_row(layer, rng, windows=(None, 1, 16, 17, 40, 100)):
    return tuple(windows[i] for i in rng.integers(len(windows), size=layer.n_head_kv))


def replayed(layerwise, layer, row, n_sink=0):
    """[n_query, n_head, head_dim_v] for each trace: attention under a row, from what the run that ended at the layer
    captured."""
    attention, queries, n_gqa = layerwise.attention(), layerwise.queries(layer), layer.n_head // layer.n_head_kv
    result = []
    for i, positions in enumerate(layerwise.samples):
        heads = []
        for h, window in enumerate(row):
            group = slice(h * n_gqa, (h + 1) * n_gqa)
            heads.append(
                replay(
                    queries[i][:, group],
                    positions,
                    *layerwise.keys_values(layer, h, i),
                    [] if window is None else [window],
                    scale=attention["scale"],
                    n_sink=n_sink,
                    softcap=attention["softcap"],
                    sinks=None if attention["sinks"] is None else attention["sinks"][group],
                )[0]
            )
        result.append(np.concatenate(heads, axis=1))
    return result


def error(actual, expected):
    actual, expected = (np.concatenate(x).astype(np.float64) for x in (actual, expected))
    return ((actual - expected) ** 2).sum() / (expected**2).sum()


def walk(layerwise, layers, rows, n_sink=0):
    """From the start to the end under these rows; yields (layer, row, replayed output) at each cut, before the layer
    attends."""
    layerwise.run(START, layers[0].layer)
    for i, (layer, row) in enumerate(zip(layers, rows)):
        expected = replayed(layerwise, layer, row, n_sink)
        layerwise.set_windows(layer.layer, row, n_sink)
        layerwise.run(layer.layer, layers[i + 1].layer if i + 1 < len(layers) else END)
        yield layer, row, expected


def words(model, n_tokens, seed=0):
    """Tokens of a text in the miniature's language, which every tokenizer takes."""
    tokens = model.tokenize("".join(needle_prompt(seed + i, 400, 300)[0] for i in range(3)), add_special=True)
    assert len(tokens) >= n_tokens
    return tokens[:n_tokens]


@pytest.fixture(scope="module")
def deep_hybrid(tmp_path_factory):
    """Path of random F32 weights: four configurable layers of 4 KV heads, with two recurrent ones below each."""
    path = tmp_path_factory.mktemp("random") / "qwen35.gguf"
    write_qwen35(path, seed=5, n_layer=12)
    return path


# captured Q, K, V against the attention output

CASES = [
    # lengths: 193 = 3 x 64 + 1, so that the last ubatch is one token
    *(
        ("mini_hybrid", n_ubatch, type_k, type_v, lengths, TOLERANCE)
        for n_ubatch, lengths in ((64, (193,)), (64, (200, 77, 131)), (512, (513,)), (512, (300, 1, 222)))
        for type_k, type_v in (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
    ),
    ("mini_hybrid", 64, "f32", "f32", (193,), TOLERANCE),
    ("smollm2", 64, "f16", "f16", (65, 40), 1e-5),
    ("smollm2", 512, "q8_0", "q4_0", (90, 40), 1e-3),
    ("gemma3", 64, "f16", "f16", (65, 40), 1e-5),
    ("gemma3", 512, "q8_0", "q8_0", (90, 40), 1e-3),
]


@pytest.mark.parametrize("n_sink", SINKS)
@pytest.mark.parametrize(("name", "n_ubatch", "type_k", "type_v", "lengths", "tolerance"), CASES)
def test_output_is_the_replay_of_what_was_captured(request, name, n_ubatch, type_k, type_v, lengths, tolerance, n_sink):
    path, rng = request.getfixturevalue(name), np.random.default_rng(1)
    layers = ModelGeometry.from_gguf(path).configurable
    rows = [random_row(layer, rng) for layer in layers]
    worst = 0
    with Model(path, options(n_ubatch, type_k, type_v)) as model:
        traces = [words(model, n, seed) for seed, n in enumerate(lengths)]
        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            for layer, row, expected in walk(layerwise, layers, rows, n_sink):
                outputs = layerwise.outputs(layer)
                assert [x.shape for x in outputs] == [
                    (len(p), layer.n_head, layer.head_dim_v) for p in layerwise.samples
                ]
                worst = max(worst, error(outputs, expected))
                assert worst <= tolerance, f"layer {layer.layer}, row {row}"
                if (type_k, lengths) == ("f16", (193,)):
                    tiles = layerwise.samples[0] < 192
                    assert error([outputs[0][tiles]], [expected[0][tiles]]) <= TILES
    print(f"largest error {worst:.1e}, {tolerance:.0e} allowed")


@pytest.mark.parametrize("type_k", ["f16", "q4_0"])
def test_a_wrong_row_is_noticed(deep_hybrid, type_k):
    """Negative control: windows off by one, or two heads' exchanged, against the error of the right row in the same
    run."""
    layer = ModelGeometry.from_gguf(deep_hybrid).configurable[0]
    right, rng = (None, 16, 40, 100), np.random.default_rng(2)
    wrong = [(None, 17, 40, 100), (None, 16, 39, 100), (None, 16, 40, 101), (16, None, 40, 100), (None, 40, 16, 100)]
    with Model(deep_hybrid, options(type_k=type_k)) as model:
        traces = [rng.integers(0, model.n_vocab, 192).astype(np.int32)]
        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            layerwise.run(START, layer.layer)
            expected = {row: replayed(layerwise, layer, row) for row in (right, *wrong)}
            layerwise.set_windows(layer.layer, right)
            layerwise.run(layer.layer, END)
            off = {row: error(layerwise.outputs(layer), output) for row, output in expected.items()}
    print(off)
    assert min(off[row] for row in wrong) > NOTICED * off[right]


@pytest.mark.parametrize("n_sink", SINKS)
def test_every_architecture(random_models, n_sink):
    """Learned sinks, soft-capping, scales of their own, experts, hybrids: each random model that geometry takes."""
    ran, others, worst = [], [], 0
    with_sinks, with_softcap = set(), set()
    for path in random_models:
        geometry, rng = ModelGeometry.from_gguf(path), np.random.default_rng(3)
        layers = geometry.configurable
        if geometry.refusal or not layers:
            others.append(path.stem)
            continue
        rows = [random_row(layer, rng) for layer in layers]
        with Model(path, options()) as model:
            traces = [rng.integers(1, model.n_vocab, n).astype(np.int32) for n in (193, 40)]  # two have 256 positions
            try:
                layerwise = Layerwise(model, traces, samples_of(traces, rng))
            except HwkvError as refusal:
                assert path.stem in NO_FLASH_ATTENTION and "calibration needs FlashAttention" in str(refusal)
                others.append(path.stem)
                continue
            with layerwise:
                layerwise.run(START, layers[0].layer)
                attention = layerwise.attention()
                with_sinks |= {path.stem} if attention["sinks"] is not None else set()
                with_softcap |= {path.stem} if attention["softcap"] else set()
                for layer, row, expected in walk(layerwise, layers, rows, n_sink):
                    off = error(layerwise.outputs(layer), expected)
                    worst = max(worst, off)
                    assert off <= TOLERANCE_RANDOM, f"{path.stem}, layer {layer.layer}, row {row}: {off}"
        ran.append(path.stem)
    print(f"{len(ran)} ran, largest error {worst:.1e}; not calibrated: {', '.join(others)}")
    assert len(ran) >= 102
    assert with_sinks >= {"gpt-oss-moe", "mimo2-moe", "granite_swa-dense"}
    assert with_softcap >= {"gemma2-dense"}


# the last run against the grouped cache


def logits_of(layerwise, wanted):
    """Logits [len(wanted), n_vocab] after the batch's tokens `wanted`; the run that made them had these flagged."""
    llama_cpp = native.load()
    n_vocab = layerwise._context.model.n_vocab
    return np.array(
        [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(layerwise._ctx, int(i)), (n_vocab,)).copy()
            for i in wanted
        ]
    )


def final_logits(layerwise, layers, rows, n_last, n_sink=0):
    """Logits of the last tokens of each trace, after runs from layer to layer: [n_trace, n_last, n_vocab]."""
    ends = np.cumsum([len(t) for t in layerwise.traces])
    wanted = np.concatenate([np.arange(end - n_last, end) for end in ends])
    layerwise.run(START, layers[0].layer)
    for i, (layer, row) in enumerate(zip(layers, rows)):
        layerwise.set_windows(layer.layer, row, n_sink)
        last = i + 1 == len(layers)
        for token in wanted if last else ():
            layerwise._batch.logits[int(token)] = True
        layerwise.run(layer.layer, END if last else layers[i + 1].layer)
    logits = logits_of(layerwise, wanted)
    for token in wanted:
        layerwise._batch.logits[int(token)] = False
    return logits.reshape(len(ends), n_last, -1)


def nmse(actual, expected):
    """Of logits, each row centred."""
    actual, expected = (x - x.mean(-1, keepdims=True, dtype=np.float64) for x in (actual, expected))
    return np.square(actual - expected).sum() / np.square(expected).sum()


# the same kernels see the same cells: mostly not one bit differs. Several traces split into other ubatches than one
LOGITS = [
    ("deep_hybrid", 64, "f16", (193,)),
    ("deep_hybrid", 64, "q4_0", (200, 77, 131)),
    ("deep_hybrid", 512, "f16", (513,)),
    ("smollm2", 64, "f16", (97,)),
    ("gemma3", 64, "f16", (97,)),
]
LOGITS_LIMIT = 1e-5


@pytest.mark.parametrize("n_sink", SINKS)
@pytest.mark.parametrize(("name", "n_ubatch", "type_kv", "lengths"), LOGITS)
def test_logits_are_those_of_the_grouped_cache(request, name, n_ubatch, type_kv, lengths, n_sink):
    path, rng = request.getfixturevalue(name), np.random.default_rng(4)
    layers = ModelGeometry.from_gguf(path).configurable
    rows = [random_row(layer, rng, (None, 16, 40, 70)) for layer in layers]
    n_last = 5
    with Model(path, options(n_ubatch, type_kv, type_kv)) as model:
        if name == "deep_hybrid":
            traces = [rng.integers(0, model.n_vocab, n).astype(np.int32) for n in lengths]
        else:
            traces = [words(model, n, seed) for seed, n in enumerate(lengths)]

        def grouped(policy):
            result = []
            for tokens in traces:
                with model.context(policy, len(tokens), n_batch=len(tokens)) as context:
                    assert native.active(context.handle) == (policy is not None)
                    result.append(context.decode(tokens, 0, np.arange(len(tokens)) >= len(tokens) - n_last))
            return np.array(result)

        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            actual = final_logits(layerwise, layers, rows, n_last, n_sink)
            full = final_logits(layerwise, layers, [(None,) * layer.n_head_kv for layer in layers], n_last)
        expected, expected_full = (
            grouped(Policy({layer.layer: row for layer, row in zip(layers, rows)}, n_sink)),
            grouped(None),
        )
    off, off_full, moved = nmse(actual, expected), nmse(full, expected_full), nmse(expected, expected_full)
    print(f"NMSE {off:.1e} under the policy, {off_full:.1e} with full KV; the policy moves logits by {moved:.1e}")
    assert max(off, off_full) <= LOGITS_LIMIT
    assert moved > NOTICED * LOGITS_LIMIT


# saved states


def captured(layerwise, layer):
    """Everything that a calibration reads at the cut of a layer, as one array."""
    parts = layerwise.queries(layer)
    for head in range(layer.n_head_kv):
        for i in range(len(layerwise.traces)):
            parts += layerwise.keys_values(layer, head, i)
    return np.concatenate([x.ravel() for x in parts])


def test_a_branch_from_a_saved_state_is_as_if_gone_there_directly(deep_hybrid):
    """A tree of rows, two at each of four layers, walked depth first as SeqCalib walks it; every cut bit for bit."""
    path, layers = deep_hybrid, ModelGeometry.from_gguf(deep_hybrid).configurable
    rng = np.random.default_rng(6)
    choices = [[random_row(layer, rng) for _ in range(2)] for layer in layers]
    with Model(path, options()) as model:
        traces = [rng.integers(0, model.n_vocab, n).astype(np.int32) for n in (150, 65)]
        seen = {}

        def descend(layerwise, rows):
            depth = len(rows)
            if depth == len(layers):
                seen[rows] = np.concatenate(layerwise.outputs(layers[-1]))
                return
            seen[rows] = captured(layerwise, layers[depth])
            state = layerwise.save()
            for i, row in enumerate(choices[depth]):
                if i:
                    layerwise.restore(state)
                layerwise.set_windows(layers[depth].layer, row)
                layerwise.run(layers[depth].layer, layers[depth + 1].layer if depth + 1 < len(layers) else END)
                descend(layerwise, rows + (row,))
            layerwise.drop(state)

        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            layerwise.run(START, layers[0].layer)
            descend(layerwise, ())
            samples = layerwise.samples
        leaves = [rows for rows in seen if len(rows) == len(layers)]
        assert len(leaves) == 16 and len({x.tobytes() for x in seen.values()}) == len(seen) == 31
        for rows in leaves[1::3]:
            with Layerwise(model, traces, samples) as direct:
                direct.run(START, layers[0].layer)
                for depth, row in enumerate(rows):
                    assert (captured(direct, layers[depth]) == seen[rows[:depth]]).all()
                    direct.set_windows(layers[depth].layer, row)
                    direct.run(layers[depth].layer, layers[depth + 1].layer if depth + 1 < len(layers) else END)
                assert (np.concatenate(direct.outputs(layers[-1])) == seen[rows]).all()


def test_from_the_start_to_any_layer(deep_hybrid):
    """The layers below attend in full, whatever windows were set for them."""
    path, layers = deep_hybrid, ModelGeometry.from_gguf(deep_hybrid).configurable
    rng = np.random.default_rng(7)
    with Model(path, options()) as model:
        traces = [rng.integers(0, model.n_vocab, 150).astype(np.int32)]
        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            layerwise.run(START, layers[0].layer)
            layerwise.run(layers[0].layer, layers[1].layer)
            layerwise.run(layers[1].layer, layers[2].layer)
            stepwise = captured(layerwise, layers[2])
            layerwise.set_windows(layers[1].layer, (16, 16, 16, 16))
            layerwise.run(START, layers[2].layer)
            assert (captured(layerwise, layers[2]) == stepwise).all()


def test_what_cannot_be_run_is_said_and_does_no_harm(deep_hybrid):
    path, layers = deep_hybrid, ModelGeometry.from_gguf(deep_hybrid).configurable
    rng = np.random.default_rng(8)
    first, second = layers[0].layer, layers[1].layer
    with Model(path, options()) as model:
        traces = [rng.integers(0, model.n_vocab, 100).astype(np.int32)]
        with Layerwise(model, traces, samples_of(traces, rng)) as layerwise:
            with pytest.raises(
                HwkvError, match=f"from layer {first} to layer {second} failed: nothing is kept at layer {first}"
            ):
                layerwise.run(first, second)
            layerwise.run(START, first)
            before = captured(layerwise, layers[0])
            for start, end in ((START, 0), (START, 99), (first, 1), (second, END)):
                with pytest.raises(HwkvError, match=f"decoding from layer {start} to layer {end} failed: "):
                    layerwise.run(start, end)
            layerwise.run(START, first)
            assert (captured(layerwise, layers[0]) == before).all()
            with pytest.raises(HwkvError, match="no state 7 is kept"):
                layerwise.restore(7)
            with pytest.raises(
                HwkvError, match=f"the cache of layer {first} does not hold the 101 positions of trace 0"
            ):
                layerwise.traces = [np.append(traces[0], 1)]
                layerwise.keys_values(layers[0], 0, 0)


# the garbage collector


@contextmanager
def collecting():
    """The garbage collector runs all the time in another thread."""
    stop = threading.Event()

    def collect():
        while not stop.is_set():
            gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_garbage_collection_changes_nothing(deep_hybrid):
    """Buffers that C code writes to, and objects that close themselves when they are collected."""
    path, layers = deep_hybrid, ModelGeometry.from_gguf(deep_hybrid).configurable
    rng = np.random.default_rng(9)
    rows = [random_row(layer, rng) for layer in layers]
    tokens = rng.integers(0, 256, 150).astype(np.int32)
    samples = samples_of([tokens], rng)

    def results():
        with Model(path, options()) as model, Layerwise(model, [tokens], samples) as layerwise:
            dropped = Model(path, options())
            context = dropped.context(None, 150)
            context.itself = context  # only the collector finds it, and its model
            del dropped, context
            logits = final_logits(layerwise, layers, rows, 3)
            return [
                logits,
                *(np.concatenate(layerwise.outputs(layer)) for layer, _, _ in walk(layerwise, layers, rows)),
            ]

    expected = results()
    with collecting():
        for _ in range(2):
            assert all((a == b).all() for a, b in zip(results(), expected, strict=True))


def test_a_model_outlives_its_contexts(deep_hybrid):
    """As when the traceback of an error holds a context while the model's with statement ends."""
    tokens = np.arange(40, dtype=np.int32)
    with Model(deep_hybrid, options()) as model:
        with model.context(None, 40) as context:
            expected = context.decode(tokens, 0, tokens == 39)
        context, other = model.context(None, 40), model.context(None, 40)
    assert (context.decode(tokens, 0, tokens == 39) == expected).all()
    context.close()
    assert model._handle
    other.close()
    assert not model._handle


def test_a_dense_model_of_one_layer(tmp_path):
    """The only cut is the last one, too."""
    path = tmp_path / "llama.gguf"
    write_llama(path, seed=1)
    (layer,) = ModelGeometry.from_gguf(path).configurable
    rng = np.random.default_rng(10)
    with Model(path, options()) as model:
        tokens = rng.integers(0, 256, 130).astype(np.int32)
        with closing(Layerwise(model, [tokens], samples_of([tokens], rng))) as layerwise:
            for _, _, expected in walk(layerwise, [layer], [(1, 2, 3, None)]):
                assert error(layerwise.outputs(layer), expected) <= TOLERANCE
