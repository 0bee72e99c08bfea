"""Rows of windows: read, written, checked against a model, and made into a policy."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import Layer, ModelGeometry
from ..policy.policy import FULL, Policy


def parse_row(text: str) -> list[int | None]:
    """Windows of "full,512,64", in tokens; None is full. ValueError if a cell is neither "full" nor a number."""
    return [parse_window(cell) for cell in text.split(",")]


def row_option(text: str) -> list[int | None]:
    """parse_row() for argparse's `type`."""
    try:
        return parse_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_window(text: str) -> int | None:
    """The window of "512", or None of "full". ValueError if it is neither."""
    text = text.strip()
    if text == FULL:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f'"{text[:40]}" is neither "{FULL}" nor a number of tokens')
    return int(text)


def format_row(row: WindowRow) -> str:
    """The text that parse_row() reads as this row."""
    return ",".join(FULL if w is None else str(w) for w in row)


def configurable(geometry: ModelGeometry) -> Sequence[Layer]:
    """The layers that take windows, in execution order. HwkvError if no policy fits the model."""
    if geometry.refusal:
        raise HwkvError(f"no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}")
    return geometry.configurable


def hand_made(
    geometry: ModelGeometry, rows: Mapping[int, WindowRow], provenance: Mapping[str, Any], n_sink: int = 0
) -> Policy:
    """The Policy of these rows, {layer: windows}. HwkvError if it does not fit the model."""
    policy = Policy(
        {il: tuple(row) for il, row in rows.items()}, n_sink, geometry.describe(), {**provenance, "made_by": "hand"}
    )
    policy.check(geometry)
    return policy


def check_lengths(geometry: ModelGeometry, rows: Mapping[int, WindowRow], source: str | Path) -> None:
    """HwkvError if a row is of a layer that takes no windows, or has not one window per KV head.

    source: what messages name, a file or "pattern".
    """
    heads = {layer.layer: layer.n_head_kv for layer in geometry.configurable}
    for il, row in rows.items():
        if il not in heads:
            raise HwkvError(f"{source}: layer {il} cannot take windows: {why_not(geometry, il)}")
        if len(row) != heads[il]:
            raise HwkvError(f"{source}: layer {il} gets {len(row)} windows, the model has {heads[il]} KV heads there")


def why_not(geometry: ModelGeometry, il: int) -> str | None:
    """Why layer il takes no windows."""
    for layer in geometry.layers:
        if layer.layer == il:
            return layer.reason
    return f"the model has layers 0 to {geometry.n_layer - 1}"
