"""Off is off: without a policy the logits are bit for bit those of the unpatched build."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from hwkv_llamacpp import HwkvError, Policy
from hwkv_llamacpp.gguf.geometry import ModelGeometry
from hwkv_llamacpp.runtime import native

# run in a process of its own for each build: prefill, then decode token by token; the hash of all logits
LOGITS = """
import ctypes, hashlib, json, os, sys
import llama_cpp as L
path, value, flash, kv_type, n_ctx = json.loads(sys.argv[1])
silent = L.llama_log_callback(lambda level, text, _: None)
L.llama_log_set(silent, ctypes.c_void_p(0))
L.llama_backend_init()
mparams = L.llama_model_default_params()
if value:
    overrides = (L.llama_model_kv_override * 2)()
    overrides[0].tag = L.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].key = b"hwkv.policy"
    overrides[0].value.val_str = value.encode()
    mparams.kv_overrides = overrides
model = L.llama_model_load_from_file(path.encode(), mparams)
cparams = L.llama_context_default_params()
cparams.n_ctx, cparams.n_batch, cparams.n_ubatch = n_ctx, 512, 64
cparams.n_threads = cparams.n_threads_batch = 1
cparams.flash_attn_type = flash
cparams.type_k = cparams.type_v = kv_type
ctx = L.llama_init_from_model(model, cparams)
n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
tokens = [7 + (i * i * 31 + i) % (min(n_vocab, 5000) - 7) for i in range(600)]
digest = hashlib.sha256()
at = 0
for n in [300, 212] + [1] * 8:
    batch = (L.llama_token * n)(*tokens[at:at + n])
    assert L.llama_decode(ctx, L.llama_batch_get_one(batch, n)) == 0
    digest.update(ctypes.string_at(L.llama_get_logits_ith(ctx, -1), 4 * n_vocab))
    at += n
print(digest.hexdigest())
"""

F16, Q8_0 = 1, 8
FA_OFF, FA_ON = 0, 1


def logits(library_folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", LOGITS, json.dumps(arguments)],
        text=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library_folder)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("flash, kv_type", [(FA_ON, F16), (FA_OFF, F16), (FA_ON, Q8_0)])
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "mini_hybrid"])
def test_no_policy_is_upstream_bit_for_bit(request, name, flash, kv_type, tmp_path):
    try:
        upstream, ours = native.build_dir(upstream=True) / "bin", native.build_dir() / "bin"
    except HwkvError as error:
        pytest.skip(str(error))
    path = str(request.getfixturevalue(name))
    wanted = logits(upstream, path, "", flash, kv_type, 1024)
    assert wanted != hashlib.sha256().hexdigest()
    assert logits(ours, path, "", flash, kv_type, 1024) == wanted
    assert logits(ours, path, "off", flash, kv_type, 1024) == wanted

    # a policy of full windows, and one whose windows cover the context, take upstream's path as well
    geometry = ModelGeometry.from_gguf(path)
    for window in (None, 1024):
        policy = tmp_path / f"{window}.json"
        Policy({layer.layer: (window,) * layer.n_head_kv for layer in geometry.configurable}).save(policy)
        assert logits(ours, path, str(policy), flash, kv_type, 1024) == wanted

    # the comparison can fail: a window does change the logits
    policy = tmp_path / "windows.json"
    Policy({layer.layer: (64,) * layer.n_head_kv for layer in geometry.configurable}).save(policy)
    assert logits(ours, path, str(policy), flash, kv_type, 1024) != wanted
