"""Names and values as text: what a file holds may be anything, what is shown may not.

On Linux a file's name may be any bytes, in JSON and HTML it may not. A value from a file may be a megabyte long, or
hold characters that a terminal obeys.
"""

import os
import re
import reprlib
import unicodedata
from collections.abc import Callable
from typing import Any

MAX_VALUE = 60  # characters of a value in a sentence
MAX_MESSAGE = 800  # characters of a sentence with a long path or two
OBEYED = ("Cc", "Cf", "Zl", "Zp")  # control characters, direction marks, line separators

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_VALUE


def as_text(name: str | bytes | os.PathLike[str]) -> str:
    """The name, with the replacement character for what is not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def show(value: Any) -> str:
    """A value as Python writes it, on one line and short: of a long list the first items."""
    return escaped(_repr.repr(value))


def clip(text: object, n: int = MAX_VALUE) -> str:
    """The text, or its beginning and end where it is longer than n."""
    text = str(text)
    return text if len(text) <= n else f"{text[: n * 2 // 3]}...{text[len(text) + 3 - (n - n * 2 // 3) :]}"


def escaped(text: str) -> str:
    """The text with \\x1b and the like for characters that a terminal obeys instead of showing."""
    return _replace(text, lambda match: match[0].encode("unicode_escape").decode())


def escaped_json(text: str) -> str:
    """The same JSON, with \\u009b and the like for such characters; its own line ends stay."""
    return _replace(text, lambda match: match[0] if match[0] == "\n" else _json_escape(match[0]))


def message(text: object) -> str:
    """A sentence for the terminal."""
    return escaped(clip(text, MAX_MESSAGE))


def _replace(text: str, by: Callable[[re.Match[str]], str]) -> str:
    if text.isascii() and text.isprintable():
        return text
    return re.sub(
        r"[^\x20-\x7e]", lambda match: by(match) if unicodedata.category(match[0]) in OBEYED else match[0], text
    )


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
