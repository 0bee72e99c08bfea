"""Drives libllama through the low-level llama_cpp bindings: fixed tokens in, logits at chosen positions out."""

import ctypes
import os
from contextlib import contextmanager

import numpy as np
from gguf.constants import GGMLQuantizationType

from hwkv_llamacpp.policy.footprint import CACHE_TYPES
from hwkv_llamacpp.runtime import llama_log, native

llama_cpp = native.load()

KV_TYPES = {name: GGMLQuantizationType[name.upper()].value for name in CACHE_TYPES}
FLASH_ATTENTION = {True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}

llama_cpp.llama_backend_init()


def _overrides(policy):
    """kv_overrides array with a value for `hwkv.policy`; the empty key ends it."""
    array = (llama_cpp.llama_model_kv_override * 2)()
    array[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    array[0].key = b"hwkv.policy"
    array[0].value.val_str = policy.encode()
    return array


class Runtime:
    """A loaded model under one policy (None: off, upstream's own path)."""

    def __init__(self, path, policy=None, n_threads=2):
        self.n_threads = n_threads
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = int(os.environ.get("HWKV_TEST_GPU_LAYERS", "0"))
        params.kv_overrides = _overrides("off" if policy is None else native.register(policy.to_json()))
        with llama_log.texts() as log:
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"cannot load {path}: {llama_log.reason(log)}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self):
        llama_cpp.llama_model_free(self.model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def tokenize(self, text):
        """Token ids of a plain text, with the start token where the model has one."""
        vocab, data = llama_cpp.llama_model_get_vocab(self.model), text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 2))()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), True, False)
        return list(ids[:count])

    def text(self, tokens):
        """The tokens as text."""
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        text, buffer = b"", ctypes.create_string_buffer(256)
        for token in tokens:
            size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False)
            text += buffer.raw[:size]
        return text.decode(errors="replace")

    @contextmanager
    def context(self, n_ctx, n_ubatch, kv_type="f16", flash=True):
        """A fresh context for one sequence. kv_type: one name for K and V, or two with a space between."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_ctx, n_ubatch, 1
        params.n_threads = params.n_threads_batch = self.n_threads
        names = kv_type.split()
        params.type_k, params.type_v = KV_TYPES[names[0]], KV_TYPES[names[-1]]
        params.flash_attn_type = FLASH_ATTENTION[flash]
        params.swa_full = False
        with llama_log.texts() as log:
            ctx = llama_cpp.llama_init_from_model(self.model, params)
        if not ctx:
            raise RuntimeError(f"cannot make a context: {llama_log.reason(log)}")
        try:
            yield Context(ctx, self.n_vocab)
        finally:
            llama_cpp.llama_free(ctx)


class Context:
    """One sequence that grows by decode()."""

    def __init__(self, ctx, n_vocab):
        self.ctx, self.n_vocab = ctx, n_vocab
        self.n_past = 0

    def info(self):
        """What the grouped cache holds, as llama_hwkv_info gives it."""
        return native.info(self.ctx)

    def decode(self, tokens, positions=()):
        """Appends tokens in one call of llama_decode; logits [len(positions), n_vocab] at absolute positions."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            wanted = {int(p) - self.n_past for p in positions}
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = int(token), self.n_past + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = i in wanted
            with llama_log.texts() as log:
                status = llama_cpp.llama_decode(self.ctx, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}: {llama_log.reason(log)}")
        finally:
            llama_cpp.llama_batch_free(batch)
        rows = [
            np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(self.ctx, int(p) - self.n_past), (self.n_vocab,)
            ).copy()
            for p in positions
        ]
        self.n_past += len(tokens)
        return np.array(rows, np.float32).reshape(len(rows), self.n_vocab)

    def run(self, tokens, positions, n_prefill, chunk=None):
        """Prefill n_prefill tokens (in calls of `chunk` tokens, default one call), the rest one by one."""
        chunk = chunk or n_prefill
        starts = list(range(0, n_prefill, chunk)) + list(range(n_prefill, len(tokens)))
        ends = starts[1:] + [len(tokens)]
        positions = sorted(positions)
        return np.concatenate(
            [self.decode(tokens[a:b], [p for p in positions if a <= p < b]) for a, b in zip(starts, ends)]
        )
