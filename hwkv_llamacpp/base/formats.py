"""Reads JSON, and checks data against a pydantic model: whatever is wrong becomes one sentence.

A format is defined once, as a pydantic model. What a value should be is told from the model's
JSON schema: its limits, else its description, else its type.
"""

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import HwkvError

MAX_DEPTH = 64  # of nested lists and objects; the C++ reader has the same limit
MAX_SAFE_DIGITS = 308  # an integer of so many digits is no larger than a double can be
MAX_SHOWN = 60  # characters of a value in a message
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # key, of a model and of a dataclass

TYPES = {"object": "a JSON object", "array": "a list", "string": "a text", "boolean": "true or false", "null": "null"}


# JSON


def to_line(value: Any) -> str:
    """JSON on one line, text kept readable."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse_json(text: str, source: object, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text, as the standard has it: no doubled keys, no NaN, no numbers beyond a double."""

    def pairs(items):
        result = {}
        for key, value in items:
            if key in result:
                raise HwkvError(f"{source}: key '{clip(key)}' occurs twice in one JSON object")
            result[key] = value
        return result

    def constant(name):
        raise HwkvError(f"{source}: not JSON: {name} is not a JSON value")

    def integer(digits):
        if len(digits) > MAX_SAFE_DIGITS and math.isinf(float(digits)):
            raise ValueError("too many digits")
        return int(digits)

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer)
        if depth(data) > max_depth:
            raise RecursionError
        to_line(data).encode()  # a lone surrogate parses, but is no text; 1e999 parses, but is no number
        return data
    except json.JSONDecodeError as error:
        raise HwkvError(f"{source}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise HwkvError(f"{source}: its JSON is nested too deeply: at most {max_depth} levels expected") from None
    except UnicodeEncodeError:
        raise HwkvError(f"{source}: not JSON: it has a text with half a surrogate pair") from None
    except ValueError as error:  # more digits than Python converts, or a float that is infinite
        too_large = "digits" in str(error) or "float" in str(error)
        raise HwkvError(f"{source}: not JSON: {'a number is too large' if too_large else error}") from None


def depth(value: Any) -> int:
    """Levels of nested objects and lists."""
    n, level = 0, [value]
    while level := [x for x in level if isinstance(x, (dict, list, tuple))]:
        n += 1
        level = [item for x in level for item in (x.values() if isinstance(x, dict) else x)]
    return n


# data


def parse(kind: Any, data: Any, source: object, name: Callable[[tuple], str] | None = None) -> Any:
    """The data as an instance of a pydantic model (or a TypedDict). HwkvError tells the first thing that is wrong.

    "FILE: key 'layers[3].windows[1]' is 0, X expected". Unknown keys come first: often they are the missing ones,
    mistyped.
    name: what to call a place in the data instead of "key '...'", a function of the tuple of keys and indices.
    """
    adapter = _adapter(kind)
    try:
        return adapter.validate_python(data)
    except ValidationError as caught:
        errors = caught.errors(include_url=False, include_context=False)
        error = next((e for e in errors if e["type"] in UNKNOWN), errors[0])
        raise HwkvError(f"{source}: {_sentence(error, schema(kind), name or _key)}") from None


def fault(where: tuple[str | int, ...], what: str) -> ValidationError:
    """A ValidationError, for validators that look at more than one value. `what` follows the name of the place."""
    kind = PydanticCustomError("fault", "{what}", {"what": what})
    return ValidationError.from_exception_data("fault", [InitErrorDetails(type=kind, loc=where, input=None)])


def schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a format."""
    return _adapter(kind).json_schema()


@functools.cache
def _adapter(kind):
    return TypeAdapter(kind)


def _sentence(error, root, name):
    place, node = [], _resolved(root, root)
    for part in error["loc"]:
        if isinstance(part, int) and "items" in node:
            inner = node["items"]
        else:
            inner = node.get("properties", {}).get(part) or node.get("additionalProperties")
        if not isinstance(inner, dict):  # a member of a union, or a key that is not known
            break
        place.append(part)
        node = _resolved(inner, root)
    if error["type"] in UNKNOWN:
        known = ", ".join(node["properties"])
        return f"{name((*place, clip(error['loc'][-1])))} is unknown; known are {known}"
    if error["type"] == "missing":
        return f"{name(tuple(place))} is missing"
    if error["type"] == "fault":
        return f"{name(tuple(place))} {error['msg']}"
    if not place:
        return f"holds {show(error['input'])}, {_expected(node)} expected"
    return f"{name(tuple(place))} is {show(error['input'])}, {_expected(node)} expected"


def _resolved(node, root):
    """The schema itself of a reference, or of something that may also be null."""
    while True:
        options = [x for x in node.get("anyOf", ()) if x != {"type": "null"}]
        if "$ref" in node:
            node = root["$defs"][node["$ref"].rsplit("/", 1)[1]]
        elif len(options) == 1:
            node = options[0]
        else:
            return node


def _expected(node):
    if "const" in node:
        return show(node["const"])
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and low == high:
        return str(low)
    if node.get("type") == "integer" and None not in (low, high):
        return f"an integer from {low} to {high}"
    kind = node.get("type")
    if kind == "object":  # its description says what it is for
        return TYPES[kind]
    return node.get("description") or TYPES.get(kind, kind)


def _key(place):
    return "key '" + "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).lstrip(".") + "'"


# texts


def show(value: Any) -> str:
    """A value as JSON shows it, clipped."""
    try:
        return clip(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return clip(repr(value))


def clip(text: object) -> str:
    text = re.sub(r"\s+", " ", str(text))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
