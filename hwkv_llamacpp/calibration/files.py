"""The files of a run folder: JSON, each defined by a class with typed fields, which is reader, writer and check."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)

from ..base.atomic import replacing
from ..base.formats import parse, parse_json
from ..errors import HwkvError
from ..policy.policy import Policy

AGAIN = "remove it, and it is made again"  # what to do about a file that is not what it should be
KNOWN_KEYS = ConfigDict(extra="forbid")

Count = Annotated[int, Field(strict=True, ge=0, description="an integer of 0 or more")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, description="a number")]
Share = Annotated[float, Field(strict=True, ge=0, le=1, description="a number from 0 to 1")]
Text = Annotated[str, Field(strict=True)]


def _table(rows: list[list[float]]) -> npt.NDArray[np.float64]:
    """float64 [row, column]."""
    if len({len(row) for row in rows}) != 1:
        raise ValueError("rows of unequal length")
    return np.array(rows, np.float64)


def _digits(table: npt.NDArray[np.float64]) -> list[list[float]]:
    return [[float(f"{x:.7g}") for x in row] for row in table]


# NumPy arrays in Python, lists in JSON
Vector = Annotated[
    npt.NDArray[np.float64],
    GetPydanticSchema(lambda _, handler: handler(list[Number])),
    AfterValidator(lambda x: np.array(x, np.float64)),
    PlainSerializer(lambda x: x.tolist()),
]
Table = Annotated[
    npt.NDArray[np.float64],
    GetPydanticSchema(lambda _, handler: handler(list[list[Number]])),
    AfterValidator(_table),
    PlainSerializer(lambda x: x.tolist()),
    Field(description="a table of numbers, one row per head and one column per window,"),
]
# with 7 significant digits, so that noise of the last bits does not change the text
ShortTable = Annotated[Table, PlainSerializer(_digits)]

PolicyField = Annotated[
    Policy,
    PlainValidator(lambda x: x if isinstance(x, Policy) else Policy.from_json(json.dumps(x))),
    PlainSerializer(lambda x: json.loads(x.to_json())),
    WithJsonSchema({"type": "object", "description": "a policy"}),
]


def to_data(value: Any) -> Any:
    """What stands in the file of a value."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value)


def write(path: str | Path, value: Any, indent: int | None = None) -> None:
    text = json.dumps(value if isinstance(value, dict) else to_data(value), indent=indent, ensure_ascii=False) + "\n"
    with replacing(path, overwrite=True) as file:
        file.write(text.encode())


def read(path: str | Path, kind: Any, check: Callable[[Any], object] | None = None, advice: str = AGAIN) -> Any:
    """The value of a class that a file holds. check(value): HwkvError if it is not what is wanted here. HwkvError names
    the file, what is wrong with it, and what to do about it."""
    path = Path(path)
    source = f"{path}: not a file of this calibration"
    try:
        try:
            value = parse(kind, parse_json(path.read_text(encoding="utf-8"), source), source)
            if check:
                check(value)
        except UnicodeDecodeError as error:
            raise HwkvError(f"not JSON: byte {error.start} is not UTF-8 text") from None
        except OSError as error:
            raise HwkvError(f"cannot read: {error.strerror}") from None
    except HwkvError as error:
        reason = str(error).removeprefix(f"{source}: ")
        raise HwkvError(f"{source}: {reason}; {advice}") from None
    return value


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)
