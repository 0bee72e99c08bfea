"""The policy: one window per KV head of each configurable layer.

The query at position p sees the key at position j, in a head of window w, iff
j <= p and (p - j < w or j < n_sink): a window counts the token itself. None is full:
every earlier position. Layers that a policy does not list are full.
"""

import json
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..base.atomic import replacing
from ..errors import HwkvError

FORMAT = "hwkv-policy"
VERSION = 1
FULL = "full"  # None in Python, -1 in a GGUF
MAX_WINDOW = 2**31 - 1  # windows are int32 in a GGUF
MAX_FILE_BYTES = 64 * 2**20  # far above any policy; keeps a wrong file from being read into memory

# first bytes of a kind of file that carries policies -> a call that reads the one in a file; gguf/embed.py adds its own
CARRIERS = {}

TOP_KEYS = ("format", "version", "model", "n_sink", "layers", "provenance")
MODEL_KEYS = {"architecture": str, "name": str, "n_layer": int, "fingerprint": str}
LAYER_KEYS = ("layer", "windows")


@dataclass(frozen=True)
class Policy:
    """A window for each KV head of the listed layers.

    layers: {layer: (window of KV head 0, of KV head 1, ...)}; a window is a positive
    number of tokens, or None for full ("full" is taken, too).
    n_sink: first positions of a sequence that every windowed head keeps besides its window.
    model: which model it was made for, as ModelGeometry.describe() gives it.
    provenance: how it was made; any JSON object.
    HwkvError if a value is not what it should be.
    """

    layers: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    n_sink: int = 0
    model: dict | None = None
    provenance: dict | None = None

    def __post_init__(self):
        source = "policy"
        if not isinstance(self.layers, dict):
            raise HwkvError(f"{source}: layers is {_show(self.layers)}, a dict of layer: windows expected")
        layers = {}
        for il, row in self.layers.items():
            il = _integer(source, "layer", il, 0, MAX_WINDOW)
            if isinstance(row, (str, bytes)) or not hasattr(row, "__iter__"):
                raise HwkvError(f"{source}: windows of layer {il} is {_show(row)}, a sequence expected")
            layers[il] = tuple(_window(source, f"window {i} of layer {il}", w) for i, w in enumerate(row))
            if not layers[il]:
                raise HwkvError(f"{source}: windows of layer {il} is empty, one window per KV head expected")
        object.__setattr__(self, "layers", dict(sorted(layers.items())))
        object.__setattr__(self, "n_sink", _integer(source, "n_sink", self.n_sink, 0, MAX_WINDOW))
        if self.model is not None:
            object.__setattr__(self, "model", _model(source, self.model))
        if self.provenance is not None and not isinstance(self.provenance, dict):
            raise HwkvError(f"{source}: provenance is {_show(self.provenance)}, a dict expected")

    # JSON

    def to_json(self):
        """The canonical text: fixed order of keys, one layer per line, a newline at the end."""
        lines = [f'  "format": "{FORMAT}"', f'  "version": {VERSION}']
        if self.model is not None:
            lines.append(f'  "model": {to_line(self.model)}')
        lines.append(f'  "n_sink": {self.n_sink}')
        rows = [
            to_line({"layer": il, "windows": [FULL if w is None else w for w in row]})
            for il, row in self.layers.items()
        ]
        lines.append('  "layers": [' + ",".join(f"\n    {row}" for row in rows) + ("\n  ]" if rows else "]"))
        if self.provenance is not None:
            lines.append(f'  "provenance": {to_line(self.provenance)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text, source="policy"):
        """Parses and checks a policy's text. `source` is the file that messages name."""
        data = parse_json(text, source)
        if not isinstance(data, dict):
            raise HwkvError(f"{source}: holds {_show(data)}, a JSON object expected")
        _known_keys(source, data, TOP_KEYS, required=("format", "version", "layers"))
        if data["format"] != FORMAT:
            raise HwkvError(f"{source}: key 'format' is {_show(data['format'])}, \"{FORMAT}\" expected")
        if type(data["version"]) is not int or data["version"] != VERSION:
            raise HwkvError(f"{source}: key 'version' is {_show(data['version'])}, {VERSION} expected")
        model = None if data.get("model") is None else _model(source, data["model"])
        n_sink = _integer(source, "key 'n_sink'", data.get("n_sink", 0), 0, MAX_WINDOW)
        provenance = data.get("provenance")
        if provenance is not None and not isinstance(provenance, dict):
            raise HwkvError(f"{source}: key 'provenance' is {_show(provenance)}, a JSON object expected")
        if not isinstance(data["layers"], list):
            raise HwkvError(f"{source}: key 'layers' is {_show(data['layers'])}, a list expected")

        layers = {}
        for i, entry in enumerate(data["layers"]):
            at = f"layers[{i}]"
            if not isinstance(entry, dict):
                raise HwkvError(f"{source}: key '{at}' is {_show(entry)}, a JSON object expected")
            _known_keys(source, entry, LAYER_KEYS, required=LAYER_KEYS, inside=f"{at}.")
            il = _integer(source, f"key '{at}.layer'", entry["layer"], 0, MAX_WINDOW)
            if il in layers:
                raise HwkvError(f"{source}: key '{at}.layer' lists layer {il} a second time")
            row = entry["windows"]
            if not isinstance(row, list) or not row:
                raise HwkvError(
                    f"{source}: key '{at}.windows' is {_show(row)}, a list of one window per KV head expected"
                )
            for k, w in enumerate(row):
                if w is None:  # full in Python only: JSON says "full"
                    raise _bad_window(source, f"key '{at}.windows[{k}]'", w)
            layers[il] = tuple(_window(source, f"key '{at}.windows[{k}]'", w) for k, w in enumerate(row))
        return cls(layers, n_sink, model, provenance)

    @classmethod
    def load(cls, path):
        """A policy from a JSON file, or the one embedded in a GGUF file."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise HwkvError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None
        for magic, read in CARRIERS.items():
            if data.startswith(magic):
                return read(path)
        if len(data) > MAX_FILE_BYTES:
            raise HwkvError(f"{path}: not a policy: it is larger than {MAX_FILE_BYTES // 2**20} MiB")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HwkvError(f"{path}: not JSON: byte {error.start} is not UTF-8 text") from None
        return cls.from_json(text, path)

    def save(self, path, overwrite=True):
        """Writes the canonical JSON, whole or not at all."""
        with replacing(path, overwrite) as file:
            file.write(self.to_json().encode())

    # meaning

    def check(self, geometry, source="policy"):
        """Passes if the policy fits the model and this version's runtime; HwkvError says why not."""
        model = self.model or {}
        for key, actual in geometry.describe().items():
            if key != "name" and key in model and model[key] != actual:
                raise HwkvError(
                    f"{source}: made for another model: key 'model.{key}' is {_show(model[key])},"
                    f" {_show(actual)} expected ({geometry.name})"
                )
        if geometry.refusal and self.layers:
            raise HwkvError(
                f"{source}: no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}"
            )
        by_number = {layer.layer: layer for layer in geometry.layers}
        for il, row in self.layers.items():
            layer = by_number.get(il)
            if layer is None:
                raise HwkvError(f"{source}: lists layer {il}, the model has layers 0 to {len(geometry.layers) - 1}")
            if layer.kind != "attention":
                raise HwkvError(f"{source}: lists layer {il}, which cannot take windows: {layer.reason}")
            if len(row) != layer.n_head_kv:
                raise HwkvError(
                    f"{source}: layer {il} has {len(row)} windows, the model has {layer.n_head_kv} KV heads there"
                )

    def row(self, layer):
        """Windows of the KV heads of a Layer, full where the policy does not list it."""
        return self.layers.get(layer.layer, (None,) * layer.n_head_kv)

    def retention(self, n_tokens, geometry=None):
        """Nominal share of KV cells kept after n_tokens, 0 to 1: the mean over KV heads of min(T, w + n_sink) / T.

        Over all configurable layers of the geometry; without one, over the listed layers only.
        """
        if n_tokens < 1:
            raise HwkvError(f"retention is asked at {n_tokens} tokens, at least 1 expected")
        rows = self.layers.values() if geometry is None else [self.row(layer) for layer in geometry.configurable]
        kept = [n_tokens if w is None else min(n_tokens, w + self.n_sink) for row in rows for w in row]
        return sum(kept) / (n_tokens * len(kept)) if kept else 1.0

    def fingerprint(self, n_layer):
        """16 hex digits. Equal for policies that treat a model of n_layer layers alike; the C++ runtime computes the
        same."""
        text = f"hwkv1 n_layer={n_layer} n_sink={self.n_sink}"
        for il, row in self.layers.items():
            if any(w is not None for w in row):
                text += f" {il}:" + ",".join(FULL if w is None else str(w) for w in row)
        value = 0xCBF29CE484222325  # FNV-1a, 64 bits
        for byte in text.encode():
            value = (value ^ byte) * 0x100000001B3 % 2**64
        return f"{value:016x}"

    def summary(self, geometry):
        """One line for people, with the fingerprint."""
        n_heads = sum(layer.n_head_kv for layer in geometry.configurable)
        windows = [w for row in self.layers.values() for w in row if w is not None]
        spread = "all full"
        if windows:
            low, high = min(windows), max(windows)
            spread = (
                f"{len(windows)} of {n_heads} KV heads in {len(geometry.configurable)} layers windowed,"
                f" {low if low == high else f'{low} to {high}'} tokens"
            )
        return f"{self.fingerprint(geometry.n_layer)}: {spread}, n_sink {self.n_sink}"


def to_line(value):
    """JSON on one line, text kept readable."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse_json(text, source):
    def pairs(items):
        result = {}
        for key, value in items:
            if key in result:
                raise HwkvError(f"{source}: key '{_clip(key)}' occurs twice in one JSON object")
            result[key] = value
        return result

    def constant(name):
        raise HwkvError(f"{source}: not JSON: {name} is not a JSON value")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        to_line(data).encode()  # a lone surrogate parses, but is no text; 1e999 parses, but is no number
        return data
    except json.JSONDecodeError as error:
        raise HwkvError(f"{source}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise HwkvError(f"{source}: its JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise HwkvError(f"{source}: not JSON: it has a text with half a surrogate pair") from None
    except ValueError as error:  # more digits than Python converts, or a float that is infinite
        too_large = "digits" in str(error) or "float" in str(error)
        raise HwkvError(f"{source}: not JSON: {'a number is too large' if too_large else error}") from None


def _known_keys(source, data, known, required=(), inside=""):
    for key in data:
        if key not in known:
            raise HwkvError(f"{source}: key '{inside}{_clip(key)}' is unknown; known are {', '.join(known)}")
    for key in required:
        if key not in data:
            raise HwkvError(f"{source}: key '{inside}{key}' is missing")


def _model(source, model):
    if not isinstance(model, dict):
        raise HwkvError(f"{source}: key 'model' is {_show(model)}, a JSON object expected")
    _known_keys(source, model, tuple(MODEL_KEYS), inside="model.")
    for key, value in model.items():
        type_ = MODEL_KEYS[key]
        if type_ is int:
            _integer(source, f"key 'model.{key}'", value, 0, MAX_WINDOW)
        elif not isinstance(value, str):
            raise HwkvError(f"{source}: key 'model.{key}' is {_show(value)}, a text expected")
    return {key: model[key] for key in MODEL_KEYS if key in model}


def _window(source, what, value):
    if value is None or isinstance(value, str) and value == FULL:
        return None
    try:
        return _integer(source, what, value, 1, MAX_WINDOW)
    except HwkvError:
        raise _bad_window(source, what, value) from None


def _bad_window(source, what, value):
    return HwkvError(f'{source}: {what} is {_show(value)}, "{FULL}" or 1 to {MAX_WINDOW} tokens expected')


def _integer(source, what, value, low, high):
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise HwkvError(f"{source}: {what} is {_show(value)}, an integer from {low} to {high} expected")
    return number


def _show(value):
    """A value as JSON shows it, clipped."""
    try:
        return _clip(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return _clip(repr(value))


def _clip(text):
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 60 else text[:57] + "..."
