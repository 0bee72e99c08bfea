"""The functions of llama-hwkv.h where they must fail: they return, and the sentence stands in err or in the log."""

import ctypes
import math
import re
import subprocess
import sys
import threading

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.calibration import layerwise
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.context import Model

# On a context that is not for calibration. In a process of its own: an exception or an assertion would end it.
CALLS = """
import ctypes, math, sys
import numpy as np
from hwkv_llamacpp import Policy
from hwkv_llamacpp.calibration import layerwise
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.context import Model

lib = native.lib()
layerwise.bind(lib)
lib.llama_hwkv_layer_drop.restype = None
with Model(sys.argv[1]) as model, model.context(eval(sys.argv[2]), 256) as context:
    ctx, ints, error = context.handle, (ctypes.c_int32 * 4)(1, 1, 1, 1), ctypes.create_string_buffer(1024)
    batch = native.load().llama_batch_init(1, 0, 1)
    batch.n_tokens = 1
    values = np.zeros(256 * 64, np.float32)
    print("windows", lib.llama_hwkv_layer_windows(ctx, 3, 0, ctypes.addressof(ints), 4))
    print("samples", lib.llama_hwkv_layer_samples(ctx, ctypes.addressof(ints), ctypes.addressof(ints), 4))
    print("run", lib.llama_hwkv_layer_run(ctx, batch, -1, 3, error, len(error)), error.value.decode())
    for name in ("q", "out", "sinks"):
        print(name, getattr(lib, f"llama_hwkv_layer_{name}")(ctx, None))
    print("scale", lib.llama_hwkv_layer_scale(ctx))
    print("kv", lib.llama_hwkv_layer_kv(ctx, 3, 0, 0, 1, values.ctypes.data, values.ctypes.data))
    print("save", lib.llama_hwkv_layer_save(ctx))
    print("restore", lib.llama_hwkv_layer_restore(ctx, 0))
    print("drop", lib.llama_hwkv_layer_drop(ctx, 0))
"""
FAILED = "the context is not one for calibration"


@pytest.fixture(scope="module")
def lib():
    try:
        lib = native.lib()
    except HwkvError as error:
        pytest.skip(str(error))
    layerwise.bind(lib)
    return lib


@pytest.mark.parametrize("policy", ["None", "Policy({3: [64] * 4, 7: [64] * 4})"])
def test_calibration_on_another_context(lib, mini_hybrid, policy):
    done = subprocess.run(
        [sys.executable, "-c", CALLS, mini_hybrid, policy], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.pop("run") == f"-1 {FAILED}"
    assert said.pop("scale") == "nan" and said.pop("drop") == "None"
    assert {said.pop(name) for name in ("q", "out", "sinks")} == {"0"}
    assert set(said) == {"windows", "samples", "kv", "save", "restore"} and set(said.values()) == {"-1"}


def test_a_failed_run_leaves_the_context_usable(lib, mini_hybrid):
    """Cuts that do not exist are refused, and the next run is right."""
    with Model(mini_hybrid) as model, model.context("calibrate", 256) as context:
        error = ctypes.create_string_buffer(1024)
        batch = native.load().llama_batch_init(8, 0, 1)
        batch.n_tokens = 8
        for i in range(8):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, i, 1, 0, False
        assert lib.llama_hwkv_layer_run(context.handle, batch, 3, 7, error, len(error)) == -1 and error.value
        assert lib.llama_hwkv_layer_run(context.handle, batch, -1, 3, error, len(error)) == 0
        assert math.isfinite(lib.llama_hwkv_layer_scale(context.handle))
        native.load().llama_batch_free(batch)


def test_every_function_catches():
    """Each body of llama-hwkv.cpp is a call that catches."""
    source = (native.ROOT / "native" / "src" / "llama-hwkv.cpp").read_text()
    header = (native.ROOT / "native" / "include" / "llama-hwkv.h").read_text()
    declared = re.findall(r"^LLAMA_API .*?\b(llama_hwkv_\w+)\(", header, re.M)
    bodies = dict(re.findall(r"^\w+ (llama_hwkv_\w+)\([^{]*\) \{\n(.*?)^\}", source, re.M | re.S))
    assert len(declared) > 20 and set(bodies) == set(declared)
    for name, body in bodies.items():
        assert re.match(r"    (return )?hwkv_(try|try_or|register)\(", body), name


def test_selecting_while_contexts_are_made(lib, mini_hybrid):
    """Each context has one policy or the other, whole."""
    geometry = ModelGeometry.from_gguf(mini_hybrid)
    policies = [Policy({3: [w] * 4, 7: [w] * 4}) for w in (64, 100)]
    expected = {policy.fingerprint(geometry.n_layer) for policy in policies}
    ids = [native.register(policy.to_json()).encode() for policy in policies]
    done, seen = threading.Event(), set()
    with Model(mini_hybrid) as model:
        error = ctypes.create_string_buffer(1024)

        def select():
            while not done.is_set():
                for id_ in ids:
                    assert lib.llama_hwkv_select(model._handle, id_, error, len(error)) == 0

        assert lib.llama_hwkv_select(model._handle, ids[0], error, len(error)) == 0
        thread = threading.Thread(target=select)
        thread.start()
        try:
            params = native.load().llama_context_default_params()
            params.n_ctx, params.n_ubatch, params.n_seq_max = 512, 64, 1
            for _ in range(40):
                handle = native.load().llama_init_from_model(model._handle, params)
                seen.add(native.info(handle)["fingerprint"])
                native.load().llama_free(handle)
        finally:
            done.set()
            thread.join(10)
    assert seen == expected
