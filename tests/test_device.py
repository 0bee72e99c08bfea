"""Logits, saved states and layerwise runs of a small model, in the memory of whatever device HWKV_TEST_GPU_LAYERS puts
it on.

Short enough for a device in software: test_vulkan.py runs this file on the Vulkan build.
"""

import ctypes
import os

import numpy as np
import pytest
import reference
from reference import random_models
from test_parity import EXACT, NOTICED_FACTOR, WINDOWED_FACTOR, nmse

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy

try:
    from parity_runtime import Runtime, llama_cpp
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from test_layerwise import error as relative_error
from test_layerwise import samples_of, walk

from hwkv_llamacpp.calibration.layerwise import Layerwise
from hwkv_llamacpp.runtime.context import Model, RuntimeOptions

N_TOKENS = 400
POSITIONS = np.arange(200, N_TOKENS)
POLICY = Policy({0: (16, None, 64, 100), 1: (None, 48, 16, 64)}, 4)
WRONG = Policy({**POLICY.layers, 0: (17, None, 64, 100)}, 4)
USUAL = ("f16", True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("random") / "llama.gguf")
    random_models.write_llama(path, seed=1, n_layer=2)
    return path


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(0, 256, N_TOKENS)


def expected(path, policy, tokens):
    return reference.load(path).logits(tokens, policy.layers, policy.n_sink, POSITIONS)


@pytest.mark.parametrize("setting", [USUAL, EXACT], ids=["f16, FlashAttention", "f32"])
def test_logits_are_the_references(path, tokens, setting):
    logits = []
    for policy in (None, POLICY):
        with Runtime(path, policy, 1) as runtime, runtime.context(1024, 64, *setting) as context:
            logits.append(context.run(tokens, POSITIONS, N_TOKENS - 5))
    floor = nmse(logits[0], expected(path, Policy(), tokens))
    off, noticed = nmse(logits[1], expected(path, POLICY, tokens)), nmse(logits[1], expected(path, WRONG, tokens))
    print(f"NMSE {floor:.1e} with full KV, {off:.1e} under the policy; a window of 17 for 16: {noticed:.1e}")
    assert off < WINDOWED_FACTOR * floor and noticed > NOTICED_FACTOR * off


def test_a_state_goes_on_in_another_context(path, tokens):
    with (
        Runtime(path, POLICY, 1) as runtime,
        runtime.context(1024, 64, *USUAL) as context,
        runtime.context(1024, 64, *USUAL) as other,
    ):
        context.run(tokens, POSITIONS[-1:], N_TOKENS)
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context.ctx, 0))()
        assert llama_cpp.llama_state_seq_get_data(context.ctx, state, len(state), 0) == len(state)
        assert llama_cpp.llama_state_seq_set_data(other.ctx, state, len(state), 0) == len(state)
        other.n_past = N_TOKENS
        a, b = (x.decode(tokens[:2], [N_TOKENS, N_TOKENS + 1]) for x in (context, other))
    assert nmse(b, a) < 1e-5  # 0 on the CPU, 3e-7 seen on Mesa's software driver; a window one off moves logits by 2e-2


def test_layerwise_attends_what_was_captured(path, tokens):
    layers = ModelGeometry.from_gguf(path).configurable
    options = RuntimeOptions(64, n_gpu_layers=int(os.environ.get("HWKV_TEST_GPU_LAYERS", "0")), n_threads=1)
    trace = tokens[:193].astype(np.int32)
    with (
        Model(path, options) as model,
        Layerwise(model, [trace], samples_of([trace], np.random.default_rng(1))) as layerwise,
    ):
        for layer, _, replayed in walk(layerwise, layers, [POLICY.row(layer) for layer in layers], POLICY.n_sink):
            off = relative_error(layerwise.outputs(layer), replayed)
            print(f"layer {layer.layer}: {off:.1e}")
            assert off < 1e-5
