"""A loaded model and its contexts, through the low-level calls of libllama.

This is what calibration and its measurements need.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import HwkvError
from ..policy.footprint import CACHE_TYPES
from ..policy.policy import Policy
from . import llama_log, native


@dataclass(frozen=True)
class RuntimeOptions:
    """How a model is run, by llama.cpp's names. None leaves llama.cpp's default. HwkvError for an unknown type."""

    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int | None = None
    n_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise HwkvError(f"{name} is '{getattr(self, name)}'; known are {', '.join(CACHE_TYPES)}")


class Model:
    """A GGUF, loaded. Close it, or use it in a with statement. HwkvError if llama.cpp cannot load it."""

    def __init__(self, path: str | Path, options: RuntimeOptions = RuntimeOptions()) -> None:
        self.options = options
        self._handle: native.Pointer = None  # llama_model
        self._n_contexts, self._closed = 0, False
        llama_cpp = native.load()
        with llama_log.texts() as logged:
            llama_cpp.llama_backend_init()
            params = llama_cpp.llama_model_default_params()
            if options.n_gpu_layers is not None:
                params.n_gpu_layers = options.n_gpu_layers
            params.kv_overrides = overrides = (llama_cpp.llama_model_kv_override * 2)()  # an empty key ends the list
            overrides[0].tag, overrides[0].key, overrides[0].value.val_str = (
                llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR,
                b"hwkv.policy",
                b"off",
            )
            self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._handle:
            raise HwkvError(f"{path}: llama.cpp cannot load it: {llama_log.reason(logged)}")
        self.vocab = llama_cpp.llama_model_get_vocab(self._handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        """Frees the model. Where contexts are still open, it is freed with the last of them.

        The traceback of an error may hold one.
        """
        self._closed = True
        if self._handle and not self._n_contexts:
            with llama_log.texts():
                native.load().llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __del__ = close

    def tokenize(self, text: str, add_special: bool = False) -> npt.NDArray[np.int32]:
        """Tokens of a text [n_token]. The text of a special token is read as any other text.

        HwkvError if the model has no tokenizer, or cannot read the text.
        """
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

    def context(
        self, policy: Policy | str | None, n_ctx: int, *, n_seq_max: int = 1, n_batch: int | None = None
    ) -> Context:
        """A Context for n_ctx positions of each of n_seq_max sequences.

        policy: a Policy, None for full KV, or "calibrate". n_batch: tokens that are decoded in one call (default:
        n_ubatch). HwkvError if llama.cpp cannot make it.
        """
        return Context(self, policy, n_ctx, n_seq_max, n_batch)


class Context:
    """A llama_context with FlashAttention, and a KV cache for each sequence.

    Close it, or use it in a with statement. Arguments and errors as Model.context()'s.
    """

    def __init__(
        self, model: Model, policy: Policy | str | None, n_ctx: int, n_seq_max: int, n_batch: int | None
    ) -> None:
        llama_cpp = native.load()
        self.model = model  # must live as long as this
        self._handle: native.Pointer = None  # llama_context
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
        params.swa_full = True  # calibration looks at all positions of a trace, layer by layer
        native.select(model._handle, policy)
        with llama_log.texts() as logged:
            self._handle = llama_cpp.llama_init_from_model(model._handle, params)
        if not self._handle:
            raise HwkvError(f"llama.cpp cannot make a context of {n_ctx} tokens: {llama_log.reason(logged)}")
        model._n_contexts += 1

    @property
    def handle(self) -> native.Pointer:
        """The llama_context pointer; None when closed."""
        return self._handle

    def close(self) -> None:
        """Frees the context, and the model if it was closed before."""
        if self._handle:
            with llama_log.texts():
                native.load().llama_free(self._handle)
            self._handle = None
            self.model._n_contexts -= 1
            if self.model._closed:
                self.model.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __del__ = close

    def decode(
        self, tokens: npt.NDArray[np.int32], first_pos: int, wanted: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """Decodes tokens [n_token] of sequence 0 from position first_pos on.

        wanted: [n_token], true where logits are asked for. Returns the logits [sum(wanted), n_vocab]. HwkvError if
        llama.cpp fails.
        """
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
def batch(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    positions: npt.NDArray[np.integer],
    sequences: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
) -> Iterator[Any]:
    """A llama_batch.

    All arrays are [n_token]: the tokens, the position and the sequence of each, and whether its logits are wanted.
    """
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
