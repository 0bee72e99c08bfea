"""Values of command-line options: functions for argparse's `type`, which say what they expected."""

import argparse
import math

MAX = 2**31 - 1  # llama.cpp counts tokens and threads in 32 bits


def whole(low, what="a number", high=MAX):
    """A parser of whole numbers from low to high."""

    def parse(text):
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise error(text, f"{what} from {low} to {high}")
        return int(text)

    return parse


count, from_zero, tokens = whole(1), whole(0), whole(1, "a number of tokens")


def share(text):
    return _number(text, 1, "a share above 0 and up to 1")


def threshold(text):
    return _number(text, 1, "a threshold above 0 and up to 1")


def seconds(text):
    return _number(text, MAX, f"a number of seconds above 0 and up to {MAX}")


def listed(item):
    """A parser of items with commas between; those given twice count once."""
    return lambda text: list(dict.fromkeys(item(part) for part in text.split(",")))


def index(text):
    """A number of a layer or KV head."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of a layer or KV head")
    return int(text)


def error(text, expected):
    """To be raised by a parser."""
    return argparse.ArgumentTypeError(f"{text[:40]!r} is not {expected}")


def _number(text, high, expected):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= high:
        raise error(text, expected)
    return value
