"""Policies made by hand, and the baselines that a calibrated policy is compared with: the same window everywhere,
StreamingLLM, DuoAttention's form, random windows, a matrix, or a pattern per layer.

Each takes a ModelGeometry and returns a Policy that fits it. What it was made from stands
in its provenance.
"""

import csv
import json
import math
import random
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

from ..errors import HwkvError
from ..policy.allocation import allocate
from ..policy.policy import FULL, MAX_FILE_BYTES, Policy


def uniform(geometry, window, keep_full=(), n_sink=0):
    """One window for every KV head. keep_full: (layer, KV head) pairs that stay full; head None is the whole layer."""
    rows = {layer.layer: [window] * layer.n_head_kv for layer in _configurable(geometry)}
    for il, head in keep_full:
        if il not in rows:
            raise HwkvError(f"layer {il} cannot be kept full: {_why_not(geometry, il)}")
        if head is not None and head >= len(rows[il]):
            raise HwkvError(
                f"KV head {head} of layer {il} cannot be kept full: the layer has KV heads 0 to {len(rows[il]) - 1}"
            )
        for i in range(len(rows[il])) if head is None else (head,):
            rows[il][i] = None
    kept = [f"{il}" if head is None else f"{il}:{head}" for il, head in keep_full]
    return _policy(
        geometry, rows, {"method": "uniform", "window": window, **({"keep_full": kept} if kept else {})}, n_sink
    )


def streaming(geometry, window, n_sink=4):
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): every KV head keeps the first n_sink tokens and a window."""
    rows = {layer.layer: [window] * layer.n_head_kv for layer in _configurable(geometry)}
    return _policy(geometry, rows, {"method": "streaming", "window": window}, n_sink)


def duo(geometry, losses, window, budget, n_sink=4):
    """DuoAttention's form (Xiao et al. 2024, arXiv 2410.10819): every KV head is full, or keeps the first n_sink tokens and a window.

    losses: {layer: [n_head_kv]} of all configurable layers, what each head would lose; those that lose most per cell are full, as many as the
    Budget holds. HwkvError if not even the windows fit.
    """
    policy = allocate(geometry, [window], {il: [[x] for x in row] for il, row in losses.items()}, n_sink, budget)
    return _policy(geometry, policy.layers, {"method": "duo", "window": window, **budget.describe()}, n_sink)


def random_windows(geometry, windows, seed, n_sink=0, budget=None):
    """Every KV head draws one of the windows, all with the same chance; the same seed draws the same.

    With a Budget all heads begin with the shortest window. In random order each draws among the windows, from its own
    upwards, with which the whole still fits; and so again, until no head can take its next longer window.
    HwkvError if the shortest window does not fit.
    """
    Policy({0: windows})  # refuses what is no window, drawn or not
    windows = sorted(windows, key=lambda w: math.inf if w is None else w)
    chance = random.Random(seed).random  # the same numbers in every version of Python
    rows = {layer.layer: [windows[0]] * layer.n_head_kv for layer in _configurable(geometry)}
    shown = {"method": "random", "windows": format_row(windows), "seed": seed}
    if budget is None:
        rows = {il: [windows[int(chance() * len(windows))] for _ in row] for il, row in rows.items()}
    else:
        _draw_within(budget, geometry, rows, windows, chance, n_sink)
        shown |= budget.describe()
    return _policy(geometry, rows, shown, n_sink)


def _draw_within(budget, geometry, rows, windows, chance, n_sink):
    def fits(row, head, window):
        before, row[head] = row[head], window
        held = budget.holds(geometry, Policy(rows, n_sink))
        row[head] = before
        return held

    shortest = Policy(rows, n_sink)
    if not budget.holds(geometry, shortest):
        raise HwkvError(
            f"the shortest window, {format_row(windows[:1])}, does not fit: it is {budget.shows(geometry, shortest)}"
        )
    heads = sorted(((row, head, 0) for row in rows.values() for head in range(len(row))), key=lambda _: chance())
    while heads:  # those that may still be raised, and the index of their window
        raised = []
        for row, head, low in heads:
            n_fit = bisect_left(range(low + 1, len(windows)), True, key=lambda i: not fits(row, head, windows[i]))
            index = low + int(chance() * (n_fit + 1))
            row[head] = windows[index]
            if index < low + n_fit:  # otherwise never again: what does not fit now fits even less later
                raised.append((row, head, index))
        heads = raised


def largest(geometry, budget, make):
    """make(window) with the largest window that fits into the Budget. HwkvError if not even a window of 1 token does."""
    window = bisect_left(range(1, budget.n_ctx + 1), True, key=lambda w: not budget.holds(geometry, make(w)))
    if not window:
        raise HwkvError(f"no window fits: 1 token per KV head is {budget.shows(geometry, make(1))}")
    policy = make(window)
    return replace(policy, provenance={**policy.provenance, **budget.describe()})


def matrix(geometry, path):
    """Windows from a file: one row per configurable layer in execution order, one column per KV head.

    CSV has "full" or a number per cell; empty lines and lines that start with # are skipped.
    JSON has the same as a list of lists, or as an object of layer number: list.
    """
    path = Path(path)
    rows = _read_json(path) if path.suffix.lower() == ".json" else _read_csv(path)
    layers = _configurable(geometry)
    if isinstance(rows, list):
        if len(rows) != len(layers):
            raise HwkvError(f"{path}: has {len(rows)} rows, the model has {len(layers)} configurable layers")
        rows = {layer.layer: row for layer, row in zip(layers, rows)}
    _check_lengths(geometry, rows, path)
    return _policy(geometry, rows, {"method": "matrix", "file": path.name})


def pattern(geometry, row=None, by_layer=None):
    """One row of windows repeated over all configurable layers, and other rows for single layers."""
    by_layer = by_layer or {}
    rows = {layer.layer: row for layer in _configurable(geometry)} if row else {}
    rows.update(by_layer)
    _check_lengths(geometry, rows, "pattern")
    shown = {str(il): format_row(r) for il, r in sorted(by_layer.items())}
    return _policy(
        geometry,
        rows,
        {"method": "pattern", **({"pattern": format_row(row)} if row else {}), **({"layers": shown} if shown else {})},
    )


def parse_row(text):
    """Windows of "full,512,64". ValueError if a cell is neither "full" nor a number."""
    return [parse_window(cell) for cell in text.split(",")]


def parse_window(text):
    text = text.strip()
    if text == FULL:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f'"{text[:40]}" is neither "{FULL}" nor a number of tokens')
    return int(text)


def format_row(row):
    return ",".join(FULL if w is None else str(w) for w in row)


def _configurable(geometry):
    if geometry.refusal:
        raise HwkvError(f"no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}")
    return geometry.configurable


def _policy(geometry, rows, provenance, n_sink=0):
    policy = Policy(rows, n_sink, geometry.describe(), {**provenance, "made_by": "hand"})
    policy.check(geometry)
    return policy


def _check_lengths(geometry, rows, source):
    heads = {layer.layer: layer.n_head_kv for layer in geometry.configurable}
    for il, row in rows.items():
        if il not in heads:
            raise HwkvError(f"{source}: layer {il} cannot take windows: {_why_not(geometry, il)}")
        if len(row) != heads[il]:
            raise HwkvError(f"{source}: layer {il} gets {len(row)} windows, the model has {heads[il]} KV heads there")


def _why_not(geometry, il):
    for layer in geometry.layers:
        if layer.layer == il:
            return layer.reason
    return f"the model has layers 0 to {geometry.n_layer - 1}"


def _read(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except UnicodeDecodeError:
        raise HwkvError(f"{path}: is not UTF-8 text") from None
    except OSError as error:
        raise HwkvError(f"{path}: cannot read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise HwkvError(f"{path}: not a matrix of windows: it is larger than {MAX_FILE_BYTES // 2**20} MiB")
    return text


def _read_csv(path):
    rows = []
    reader = csv.reader(_read(path).splitlines())
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return rows
        except csv.Error as error:
            raise HwkvError(f"{path}: line {reader.line_num}: {error}") from None
        if not cells or not "".join(cells).strip() or cells[0].lstrip().startswith("#"):
            continue
        try:
            rows.append([parse_window(cell) for cell in cells])
        except ValueError as error:
            raise HwkvError(f"{path}: line {reader.line_num}: {error}") from None


def _read_json(path):
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise HwkvError(f"{path}: not JSON: {error}") from None
    if isinstance(data, dict):
        try:
            data = {int(il): row for il, row in data.items()}
        except ValueError:
            raise HwkvError(f"{path}: keys that are layer numbers expected") from None
    rows = data.values() if isinstance(data, dict) else data
    if not isinstance(data, (dict, list)) or not all(isinstance(row, list) for row in rows):
        raise HwkvError(f"{path}: a list of rows, or an object of layer: row expected")
    return data
