"""Values of command-line options: functions for argparse's `type`, which say what they expected."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX = 2**31 - 1  # llama.cpp counts tokens and threads in 32 bits


def whole(low: int, what: str = "a number", high: int = MAX) -> Callable[[str], int]:
    """A parser of whole numbers from low to high. `what` names them in the error."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise error(text, f"{what} from {low} to {high}")
        return int(text)

    return parse


count, from_zero, tokens = whole(1), whole(0), whole(1, "a number of tokens")


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    return _number(text, 1, "a share above 0 and up to 1")


def threshold(text: str) -> float:
    """A number above 0 and up to 1."""
    return _number(text, 1, "a threshold above 0 and up to 1")


def seconds(text: str) -> float:
    """A number above 0."""
    return _number(text, MAX, f"a number of seconds above 0 and up to {MAX}")


def listed(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A parser of items with commas between. item: parses one. An item that is given twice counts once."""
    return lambda text: list(dict.fromkeys(item(part) for part in text.split(",")))


def index(text: str) -> int:
    """A number of a layer or KV head, from 0."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of a layer or KV head")
    return int(text)


def error(text: str, expected: str) -> argparse.ArgumentTypeError:
    """The error that a parser raises."""
    return argparse.ArgumentTypeError(f"{text[:40]!r} is not {expected}")


def _number(text: str, high: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= high:
        raise error(text, expected)
    return value
