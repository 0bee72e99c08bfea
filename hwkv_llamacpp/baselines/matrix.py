"""Windows from a file."""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.policy import MAX_FILE_BYTES, Policy
from .baseline import Baseline
from .rows import check_lengths, configurable, hand_made, parse_window


class Matrix(Baseline):
    name = "matrix"
    help = "windows from a file"
    details = (
        'One row per configurable layer, in order; one cell per KV head: "full" or a number of tokens. CSV, or JSON'
        " as a list of rows or an object of layer: row."
    )
    example = "hwkv policy make matrix model.gguf --matrix windows.csv -o policy.json"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--matrix", type=Path, required=True, metavar="FILE", help="windows as .csv or .json")

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        return matrix(geometry, args.matrix)


def matrix(geometry: ModelGeometry, path: str | Path) -> Policy:
    """Windows from a file: one row per configurable layer in execution order, one column per KV head.

    CSV has "full" or a number of tokens per cell; empty lines and lines that start with # are skipped. JSON has the
    same as a list of lists, or as an object of layer number: list. HwkvError if the file cannot be read, or does not
    fit the model.
    """
    path = Path(path)
    found = _read_json(path) if path.suffix.lower() == ".json" else _read_csv(path)
    layers = configurable(geometry)
    if isinstance(found, list) and len(found) != len(layers):
        raise HwkvError(f"{path}: has {len(found)} rows, the model has {len(layers)} configurable layers")
    rows = found if isinstance(found, dict) else {layer.layer: row for layer, row in zip(layers, found)}
    check_lengths(geometry, rows, path)
    return hand_made(geometry, rows, {"method": "matrix", "file": path.name})


def _read(path: Path) -> str:
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


def _read_csv(path: Path) -> list[WindowRow]:
    rows: list[WindowRow] = []
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


def _read_json(path: Path) -> list[WindowRow] | dict[int, WindowRow]:
    try:
        data: Any = json.loads(_read(path))
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
