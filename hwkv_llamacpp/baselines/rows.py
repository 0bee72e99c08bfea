"""Rows of windows: read, written, checked against a model, and made into a policy."""

import argparse

from ..errors import HwkvError
from ..policy.policy import FULL, Policy


def parse_row(text):
    """Windows of "full,512,64". ValueError if a cell is neither "full" nor a number."""
    return [parse_window(cell) for cell in text.split(",")]


def row_option(text):
    """parse_row() for argparse's `type`."""
    try:
        return parse_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_window(text):
    text = text.strip()
    if text == FULL:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f'"{text[:40]}" is neither "{FULL}" nor a number of tokens')
    return int(text)


def format_row(row):
    return ",".join(FULL if w is None else str(w) for w in row)


def configurable(geometry):
    if geometry.refusal:
        raise HwkvError(f"no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}")
    return geometry.configurable


def hand_made(geometry, rows, provenance, n_sink=0):
    policy = Policy(rows, n_sink, geometry.describe(), {**provenance, "made_by": "hand"})
    policy.check(geometry)
    return policy


def check_lengths(geometry, rows, source):
    heads = {layer.layer: layer.n_head_kv for layer in geometry.configurable}
    for il, row in rows.items():
        if il not in heads:
            raise HwkvError(f"{source}: layer {il} cannot take windows: {why_not(geometry, il)}")
        if len(row) != heads[il]:
            raise HwkvError(f"{source}: layer {il} gets {len(row)} windows, the model has {heads[il]} KV heads there")


def why_not(geometry, il):
    for layer in geometry.layers:
        if layer.layer == il:
            return layer.reason
    return f"the model has layers 0 to {geometry.n_layer - 1}"
