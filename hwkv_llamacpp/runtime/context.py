"""A loaded model and its contexts, through the low-level calls of libllama: what calibration and its measurements
need."""

import ctypes
import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..errors import HwkvError
from ..policy.footprint import CACHE_TYPES
from . import llama_log, native


@dataclass(frozen=True)
class RuntimeOptions:
    """How a model is run, by llama.cpp's names. None leaves llama.cpp's default."""

    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int | None = None
    n_threads: int | None = None

    def __post_init__(self):
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise HwkvError(f"{name} is '{getattr(self, name)}'; known are {', '.join(CACHE_TYPES)}")


class Model:
    """A GGUF, loaded. Close it, or use it in a with statement."""

    def __init__(self, path, options=RuntimeOptions()):
        self.options = options
        self._handle = None
        self._n_contexts, self._closed = 0, False
        llama_cpp = native.load()
        with llama_log.texts() as logged:
            llama_cpp.llama_backend_init()
            params = llama_cpp.llama_model_default_params()
            if options.n_gpu_layers is not None:
                params.n_gpu_layers = options.n_gpu_layers
            params.kv_overrides = overrides = (llama_cpp.llama_model_kv_override * 2)()  # the empty key ends it
            overrides[0].tag, overrides[0].key, overrides[0].value.val_str = (
                llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR,
                b"hwkv.policy",
                b"off",
            )
            self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._handle:
            raise HwkvError(f"{path}: llama.cpp cannot load it: {llama_log.reason(logged)}")
        self.vocab = llama_cpp.llama_model_get_vocab(self._handle)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self):
        """Frees the model; where contexts are still open (an error's traceback may hold one), with the last of them."""
        self._closed = True
        if self._handle and not self._n_contexts:
            with llama_log.texts():
                native.load().llama_model_free(self._handle)
            self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    __del__ = close

    def tokenize(self, text, add_special=False):
        """Tokens of a text, int32. The texts of special tokens are no special tokens."""
        data = text.encode()
        if native.load().llama_vocab_type(self.vocab) == native.load().LLAMA_VOCAB_TYPE_NONE:
            raise HwkvError("the model has no tokenizer: texts cannot be read with it")
        tokenize = native.load().llama_tokenize
        tokens = np.empty(len(data) + 16, dtype=np.int32)
        n = tokenize(
            self.vocab,
            data,
            len(data),
            tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            len(tokens),
            add_special,
            False,
        )
        if n < 0:
            raise HwkvError(f"the model cannot tokenize a text of {len(data)} bytes")
        return tokens[:n]

    def context(self, policy, n_ctx, *, n_seq_max=1, n_batch=None):
        """A Context for n_ctx positions of each of n_seq_max sequences, under a Policy, None for full KV, or
        "calibrate"."""
        return Context(self, policy, n_ctx, n_seq_max, n_batch)


class Context:
    """A llama_context with FlashAttention and a KV cache of its own for each sequence. Close it, or use it in a with
    statement."""

    def __init__(self, model, policy, n_ctx, n_seq_max, n_batch):
        llama_cpp = native.load()
        self.model = model  # must live as long
        self._handle = None
        options = model.options
        types = {name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in {options.type_k, options.type_v}}
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = -(-n_ctx // 256) * 256 * n_seq_max
        params.n_batch = n_batch or options.n_ubatch
        params.n_ubatch = min(options.n_ubatch, params.n_batch)
        params.n_seq_max = n_seq_max
        params.n_threads = params.n_threads_batch = options.n_threads or os.cpu_count()
        params.type_k, params.type_v = types[options.type_k], types[options.type_v]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.swa_full = True  # a whole trace is looked at, layer by layer
        native.select(model._handle, policy)
        with llama_log.texts() as logged:
            self._handle = llama_cpp.llama_init_from_model(model._handle, params)
        if not self._handle:
            raise HwkvError(f"llama.cpp cannot make a context of {n_ctx} tokens: {llama_log.reason(logged)}")
        model._n_contexts += 1

    @property
    def handle(self):
        return self._handle

    def close(self):
        if self._handle:
            with llama_log.texts():
                native.load().llama_free(self._handle)
            self._handle = None
            self.model._n_contexts -= 1
            if self.model._closed:
                self.model.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    __del__ = close

    def decode(self, tokens, first_pos, wanted):
        """Decodes tokens of sequence 0 from position first_pos. Logits [sum(wanted), n_vocab] float32 where wanted
        [n_token] is true."""
        llama_cpp = native.load()
        with (
            batch(tokens, np.arange(first_pos, first_pos + len(tokens)), np.zeros(len(tokens)), wanted) as b,
            llama_log.texts(),
        ):
            code = llama_cpp.llama_decode(self._handle, b)
        if code != 0:
            raise HwkvError(f"decoding of {len(tokens)} tokens at position {first_pos} failed with {code}")
        rows = int(np.count_nonzero(wanted))
        if not rows:
            return np.empty((0, self.model.n_vocab), dtype=np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._handle), shape=(rows, self.model.n_vocab)).copy()


@contextmanager
def batch(tokens, positions, sequences, wanted):
    """A llama_batch of tokens, one sequence each."""
    llama_cpp = native.load()
    b = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        b.n_tokens = len(tokens)
        for i in range(len(tokens)):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = (
                int(tokens[i]),
                int(positions[i]),
                1,
                int(sequences[i]),
                bool(wanted[i]),
            )
        yield b
    finally:
        llama_cpp.llama_batch_free(b)
