"""Files of rows: JSONL, one row a line. Rows are appended; each stands alone."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ..base import formats
from ..errors import HwkvError
from . import rows
from .rows import CHOICE, KINDS, VERSION, Row

BEGINNING = '{"kind": '

AnyRow = Annotated[rows.AnyRow, Field(discriminator="kind")]


class _Head(BaseModel):
    """What tells how the rest of a row is to be read."""

    version: Literal[1] = VERSION
    kind: Annotated[Literal[tuple(KINDS)], CHOICE]  # type: ignore[valid-type]  # the rows tell which


def schema() -> dict[str, Any]:
    """The JSON schema of a row."""
    return formats.schema(AnyRow)


def append(path: str | Path, row: Row) -> None:
    """Adds one line, in one write: a killed run leaves whole lines, at worst a last one without its end."""
    path = Path(path)
    line = formats.to_line({name: value for name, value in row.model_dump().items() if value is not None}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = "\n" + line  # after a line without its end
            data = line.encode()
            if os.write(fd, data) != len(data):
                raise HwkvError(f"{path}: cannot write: the row was cut short; is the disk full?")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise HwkvError(f"{path}: cannot write: {error.strerror}") from None


def read(path: str | Path, missing_ok: bool = False) -> list[Row]:
    """The rows of a JSONL file, of whatever kind. A line that a kill or a power failure cut short is left out, with a
    word on stderr; any other bad line is an HwkvError."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if missing_ok:
            return []
        raise HwkvError(f"{path}: cannot read: no such file") from None
    except OSError as error:
        raise HwkvError(f"{path}: cannot read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                json.loads(line)
            except ValueError:
                if line.startswith(BEGINNING) or BEGINNING.startswith(line) or not line.strip("\0"):
                    print(f"{path}: line {number} was cut short and is left out", file=sys.stderr)
                    continue
            rows.append(_row(line, f"{path}: line {number}"))
    return rows


def _row(line: str, source: object) -> Row:
    data = formats.parse_json(line, source)
    kind = formats.parse(_Head, data, source).kind
    return formats.parse(KINDS[kind], data, source)
