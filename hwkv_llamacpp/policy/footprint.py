"""Predicted bytes of the KV cache that the runtime allocates under a policy.

The rule is the runtime's own, so prediction and allocation agree to the byte:

    n_ctx_seq    = n_ctx padded to 256 (unified), or its n_seq_max-th part padded to 256
    cells(full)  = n_ctx_seq
    cells(w)     = min(n_ctx_seq, pad256((w + n_sink + slack) * sharing + n_ubatch))
                   sharing is the number of sequences in one ring: n_seq_max if unified, else 1; for slack see
                   draft_slack
    K of a layer = row_size(type_k, heads * head_dim_k) * cells * streams, V likewise

One group is one cache: all heads of one window, over all layers. A window w is full
if w + n_sink >= n_ctx_seq: no query is beyond it. Without FlashAttention V is stored transposed, and its rows are
padded to the widest layer of the group. kv_bytes counts configurable layers only.

The model's own sliding windows are a group of their own, by the same rule with n_sink = 0. Where no head is windowed,
upstream's cache is used: its rings have no slack, and without FlashAttention all rows of V are as wide as the model's
widest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..base.shape import LayerShape, ModelShape
from ..errors import HwkvError
from .policy import Policy

CELL_PAD = 256
MAX_SEQ = 256  # LLAMA_MAX_SEQ
DRAFT_SLACK = 64  # LLAMA_HWKV_N_SLACK
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True)
class Group:
    """The cache of one window."""

    window: int | None  # None: full
    cells: int  # per stream
    streams: int
    layers: tuple[tuple[int, int, int], ...]  # (layer, KV heads, bytes)

    @property
    def heads(self) -> int:
        return sum(heads for _, heads, _ in self.layers)

    @property
    def bytes(self) -> int:
        return sum(n for _, _, n in self.layers)


@dataclass(frozen=True)
class Footprint:
    groups: tuple[Group, ...]  # full first, then by window
    own_windows: Group | None  # of the model's own sliding-window layers
    full_kv_bytes: int  # of the same context with every head full
    n_ctx: int
    n_ctx_seq: int
    n_ubatch: int

    @property
    def active(self) -> bool:
        """False if no head is windowed at this context: the runtime then takes upstream's own path."""
        return any(group.window is not None for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    @property
    def own_windows_bytes(self) -> int:
        return self.own_windows.bytes if self.own_windows else 0

    def to_dict(self) -> dict[str, Any]:
        """The fields that the runtime reports of an active cache, by the same names."""
        return {
            "active": self.active,
            "kv_bytes": self.kv_bytes,
            "full_kv_bytes": self.full_kv_bytes,
            "groups": [
                {
                    "window": g.window,
                    "cells": g.cells,
                    "streams": g.streams,
                    "heads": g.heads,
                    "bytes": g.bytes,
                    "layers": [{"layer": il, "heads": heads, "bytes": n} for il, heads, n in g.layers],
                }
                for g in self.groups
            ],
        }


def predict(
    geometry: ModelShape,
    policy: Policy | None = None,
    n_ctx: int = 0,
    *,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    n_seq_max: int = 1,
    unified: bool = False,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attn: bool = True,
) -> Footprint:
    """Footprint of a context. Arguments are llama_context_params' (-c, -b, -ub, -np, -ctk, -ctv, -fa).

    n_ctx 0 is the trained context. HwkvError for a cache type that does not exist, or whose
    block size does not divide a head's row.
    """
    n_ctx = n_ctx or geometry.n_ctx_train
    for name, value, high in (
        ("n_ctx", n_ctx, 2**31 - 1),
        ("n_batch", n_batch, 2**31 - 1),
        ("n_seq_max", n_seq_max, MAX_SEQ),
    ):
        if not 1 <= value <= high:
            raise HwkvError(f"{name} is {value}, 1 to {high} expected")
    n_batch = min(n_ctx, n_batch)  # before the padding, as llama_context does
    n_ubatch = min(n_batch, n_ubatch or n_batch)
    n_ctx = pad(n_ctx)
    n_ctx_seq = n_ctx if unified else pad(n_ctx // n_seq_max)
    streams = 1 if unified else n_seq_max
    sharing = n_seq_max if unified else 1  # sequences in one ring
    n_sink = policy.n_sink if policy else 0

    members: dict[int | None, list[tuple[LayerShape, int]]] = {}  # window -> [(layer, heads)]
    for layer in geometry.configurable:
        row = [
            None if w is None or w + n_sink >= n_ctx_seq else w
            for w in (policy.row(layer) if policy else (None,) * layer.n_head_kv)
        ]
        for window in dict.fromkeys(row):
            members.setdefault(window, []).append((layer, row.count(window)))
    active = any(window is not None for window in members)
    slack = draft_slack(n_ubatch, n_seq_max) if active else 0
    widest_v = max((layer.n_head_kv * layer.head_dim_v for layer in geometry.layers), default=0)

    def group(window: int | None, members: Sequence[tuple[LayerShape, int]], n_sink: int, padded_v: int) -> Group:
        cells = n_ctx_seq
        if window is not None:
            cells = min(n_ctx_seq, pad((window + n_sink + slack) * sharing + n_ubatch))
        return Group(
            window,
            cells,
            streams,
            tuple(
                (
                    layer.layer,
                    heads,
                    cells
                    * streams
                    * (
                        row_bytes(type_k, heads * layer.head_dim_k)
                        + row_bytes(type_v, heads * layer.head_dim_v if flash_attn else padded_v)
                    ),
                )
                for layer, heads in members
            ),
        )

    def widest_of(window: int | None) -> int:
        return max(heads * layer.head_dim_v for layer, heads in members[window]) if active else widest_v

    groups = [
        group(window, members[window], n_sink, widest_of(window))
        for window in sorted(members, key=lambda w: (w is not None, w or 0))
    ]
    sliding = [(layer, layer.n_head_kv) for layer in geometry.layers if layer.kind == "swa"]
    own_windows = group(geometry.n_swa, sliding, 0, widest_v) if sliding else None
    full = sum(
        n_ctx_seq
        * streams
        * (row_bytes(type_k, x.n_head_kv * x.head_dim_k) + row_bytes(type_v, x.n_head_kv * x.head_dim_v))
        for x in geometry.configurable
    )
    return Footprint(tuple(groups), own_windows, full, n_ctx_seq * streams, n_ctx_seq, n_ubatch)


def draft_slack(n_ubatch: int, n_seq_max: int) -> int:
    """Positions per sequence that stay beyond a window under a policy, so that draft tokens can be taken back: the rule
    of the runtime's llama-hwkv-sizing.cpp."""
    return DRAFT_SLACK if n_seq_max > 1 or n_ubatch < DRAFT_SLACK else 0


def row_bytes(cache_type: str, n: int) -> int:
    """Bytes of n values in a cache type, as ggml_row_size counts them."""
    if cache_type not in CACHE_TYPES:
        raise HwkvError(f"cache type '{cache_type}' is unknown; known are {', '.join(CACHE_TYPES)}")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
    if n % block:
        raise HwkvError(f"cache type {cache_type} stores blocks of {block} values, which does not divide rows of {n}")
    return n // block * size


def pad(n: int) -> int:
    """n rounded up to whole blocks of cells."""
    return -(-n // CELL_PAD) * CELL_PAD
