"""Traces decoded a layer at a time: what enters the attention of a layer is seen before the layer attends.

A run goes from one configurable layer to the next. It ends where that layer has stored its K and V. Then its windows
can be chosen, and the next run attends under them. So each layer is computed once, under the windows that were chosen
below it, and a whole sequential calibration costs about one prefill of its traces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import Layer
from ..runtime import llama_log, native
from ..runtime.context import Model, batch
from .replay import replay

START = END = -1  # for run(): from the first token, past the last layer

Outputs = list[list[npt.NDArray[np.float32]]]  # of Layerwise.replay()


def bind(lib: ctypes.CDLL) -> None:
    """Declares the calibration functions of llama-hwkv.h."""
    pointer, i32, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    lib.llama_hwkv_layer_windows.argtypes = [pointer, i32, i32, pointer, i32]
    lib.llama_hwkv_layer_samples.argtypes = [pointer, pointer, pointer, i32]
    lib.llama_hwkv_layer_run.argtypes = [pointer, native.load().llama_batch, i32, i32, text, ctypes.c_size_t]
    lib.llama_hwkv_layer_kv.argtypes = [pointer, i32, i32, i32, i32, pointer, pointer]
    lib.llama_hwkv_layer_run.restype = lib.llama_hwkv_layer_kv.restype = i32
    for name in ("q", "out", "sinks"):
        function = getattr(lib, f"llama_hwkv_layer_{name}")
        function.argtypes, function.restype = [pointer, pointer], ctypes.c_size_t
    for name, number in (("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("save", i32)):
        function = getattr(lib, f"llama_hwkv_layer_{name}")
        function.argtypes, function.restype = [pointer], number
    for name, result in (("restore", i32), ("drop", None)):
        function = getattr(lib, f"llama_hwkv_layer_{name}")
        function.argtypes, function.restype = [pointer, i32], result
    lib.llama_hwkv_layer_windows.restype = lib.llama_hwkv_layer_samples.restype = i32


class Layerwise:
    """Traces in a context of their own. Close it, or use it in a with statement.

    traces: int32 token arrays [n_token], one sequence each. samples: for each trace the positions [n_query] whose
    queries are captured.
    """

    def __init__(
        self, model: Model, traces: Sequence[npt.NDArray[np.int32]], samples: Sequence[npt.NDArray[np.integer]]
    ) -> None:
        self._lib = native.lib()
        bind(self._lib)
        self.traces = traces
        self.samples = [np.asarray(positions, dtype=np.int32) for positions in samples]
        n_total = sum(map(len, traces))
        self._stack = ExitStack()
        try:
            self._context = model.context("calibrate", max(map(len, traces)), n_seq_max=len(traces), n_batch=n_total)
            self._stack.callback(self._context.close)
            sequences = np.concatenate([np.full(len(t), i) for i, t in enumerate(traces)])
            self._batch = self._stack.enter_context(
                batch(
                    np.concatenate(traces),
                    np.concatenate([np.arange(len(t)) for t in traces]),
                    sequences,
                    np.zeros(n_total),
                )
            )
        except BaseException:
            self._stack.close()
            raise
        at = np.concatenate([np.full(len(p), i, dtype=np.int32) for i, p in enumerate(self.samples)])
        positions = np.concatenate(self.samples)
        if self._lib.llama_hwkv_layer_samples(self._ctx, at.ctypes.data, positions.ctypes.data, len(at)) != 0:
            raise HwkvError("the sampled positions cannot be set")

    @property
    def _ctx(self) -> native.Pointer:
        return self._context.handle

    def close(self) -> None:
        """Frees the context."""
        self._stack.close()

    def __enter__(self) -> Layerwise:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, layer_from: int, layer_to: int) -> None:
        """Computes from the attention of one layer to that of another.

        layer_from START: from the first token on. layer_to END: past the last layer. HwkvError if llama.cpp fails.
        """
        error = ctypes.create_string_buffer(1024)
        with llama_log.texts():
            code = self._lib.llama_hwkv_layer_run(self._ctx, self._batch, layer_from, layer_to, error, len(error))
        if code != 0:
            raise HwkvError(
                f"decoding from layer {layer_from} to layer {layer_to} failed: {error.value.decode(errors='replace')}"
            )

    def logits(self, layer_from: int, positions: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.float32]:
        """Computes from the attention of a layer to the end.

        positions: of each trace [n_position]. Returns the logits [all positions, n_vocab] there, one trace after the
        other.
        """
        n_before = np.cumsum([0, *map(len, self.traces)])
        wanted = [int(start + p) for start, at in zip(n_before, positions) for p in at]
        try:
            for i in wanted:
                self._batch.logits[i] = True
            self.run(layer_from, END)
        finally:
            for i in wanted:
                self._batch.logits[i] = False
        llama_cpp, n_vocab = native.load(), self._context.model.n_vocab
        return np.array(
            [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._ctx, i), (n_vocab,)) for i in wanted]
        )

    def set_windows(self, layer: int, row: WindowRow, n_sink: int = 0) -> None:
        """Sets the windows of a layer's KV heads, None for full, for the runs that start at it."""
        windows = np.array([-1 if w is None else w for w in row], dtype=np.int32)
        if self._lib.llama_hwkv_layer_windows(self._ctx, layer, n_sink, windows.ctypes.data, len(windows)) != 0:
            raise HwkvError(f"the windows of layer {layer} cannot be set")

    def queries(self, layer: Layer) -> list[npt.NDArray[np.float32]]:
        """Q of the Layer that the last run ended at, as its attention sees it.

        One [n_query, n_head, head_dim_k] for each trace.
        """
        return self._captured(self._lib.llama_hwkv_layer_q, layer.n_head, layer.head_dim_k)

    def outputs(self, layer: Layer) -> list[npt.NDArray[np.float32]]:
        """Attention output of the Layer that the last run started at.

        One [n_query, n_head, head_dim_v] for each trace.
        """
        return self._captured(self._lib.llama_hwkv_layer_out, layer.n_head, layer.head_dim_v)

    def keys_values(
        self, layer: Layer, kv_head: int, trace: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """K [n_token, head_dim_k] and V [n_token, head_dim_v] of a KV head, as the cache holds them.

        trace: its index. HwkvError if the cache does not hold all of its positions.
        """
        n = len(self.traces[trace])
        k, v = np.empty((n, layer.head_dim_k), dtype=np.float32), np.empty((n, layer.head_dim_v), dtype=np.float32)
        if self._lib.llama_hwkv_layer_kv(self._ctx, layer.layer, kv_head, trace, n, k.ctypes.data, v.ctypes.data) != 0:
            raise HwkvError(f"the cache of layer {layer.layer} does not hold the {n} positions of trace {trace}")
        return k, v

    def attention(self) -> dict[str, Any]:
        """How the layer that the last run ended at weighs Q*K: the arguments scale, softcap and sinks of replay().

        sinks: [n_head], one for each query head, or None.
        """
        sinks = np.empty(self._lib.llama_hwkv_layer_sinks(self._ctx, None), dtype=np.float32)
        self._lib.llama_hwkv_layer_sinks(self._ctx, sinks.ctypes.data)
        return {
            "scale": self._lib.llama_hwkv_layer_scale(self._ctx),
            "softcap": self._lib.llama_hwkv_layer_softcap(self._ctx),
            "sinks": sinks if sinks.size else None,
        }

    def replay(self, layer: Layer, windows: Sequence[int], n_sink: int = 0) -> Outputs:
        """The attention output of the Layer that the last run ended at, under every window and with full history.

        One list for each KV head. It holds [n_window + 1, n_query, n_gqa, head_dim_v] for each trace; the last one has
        full history.
        """
        attention, queries, n_gqa = self.attention(), self.queries(layer), layer.n_gqa
        sinks = attention.pop("sinks")
        result = []
        for head in range(layer.n_head_kv):
            group = slice(head * n_gqa, (head + 1) * n_gqa)
            result.append(
                [
                    replay(
                        queries[i][:, group],
                        self.samples[i],
                        *self.keys_values(layer, head, i),
                        windows,
                        n_sink=n_sink,
                        sinks=None if sinks is None else sinks[group],
                        **attention,
                    )
                    for i in range(len(self.traces))
                ]
            )
        return result

    def save(self) -> int:
        """Keeps the state at the end of the last run. Returns its number."""
        return self._lib.llama_hwkv_layer_save(self._ctx)

    def restore(self, number: int) -> None:
        """Goes back to a kept state. K and V of the layer there must not have been computed anew since.

        HwkvError if it is not kept.
        """
        if self._lib.llama_hwkv_layer_restore(self._ctx, number) != 0:
            raise HwkvError(f"no state {number} is kept")

    def drop(self, number: int) -> None:
        """Forgets a kept state."""
        self._lib.llama_hwkv_layer_drop(self._ctx, number)

    def _captured(self, function: Callable[..., int], n_head: int, head_dim: int) -> list[npt.NDArray[np.float32]]:
        values = np.empty(function(self._ctx, None), dtype=np.float32)
        function(self._ctx, values.ctypes.data)
        ends = np.cumsum([len(p) for p in self.samples])
        return np.split(values.reshape(-1, n_head, head_dim), ends[:-1])
