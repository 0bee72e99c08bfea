"""The policy: one window per KV head of each configurable layer.

The query at position p sees the key at position j, in a head of window w, iff
j <= p and (p - j < w or j < n_sink): a window counts the token itself. None is full:
every earlier position. Layers that a policy does not list are full.
"""

import operator
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ..base.atomic import replacing
from ..base.formats import MAX_DEPTH, depth, fault, parse, parse_json, show, to_line
from ..base.shape import LayerShape, ModelShape
from ..errors import HwkvError

FORMAT = "hwkv-policy"
VERSION = 1
FULL = "full"  # None in Python, -1 in a GGUF
MAX_WINDOW = 2**31 - 1  # windows are int32 in a GGUF
MAX_FILE_BYTES = 2**20  # of a policy's JSON: some times what the largest model takes; the C++ reader has the same limit

# first bytes of a kind of file that carries policies -> a call that reads the one in a file; gguf/embed.py adds its own
CARRIERS: dict[bytes, Callable[[Path], "Policy"]] = {}

# The policy file. This is the one definition of the format in Python; tests hold the C++ reader against it.

Version = Annotated[int, Field(strict=True, ge=VERSION, le=VERSION)]
Number = Annotated[int, Field(strict=True, ge=0, le=MAX_WINDOW)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=MAX_WINDOW)]
Window = Annotated[Tokens | Literal["full"], Field(description=f'"{FULL}" or 1 to {MAX_WINDOW} tokens')]
Text = Annotated[str, Field(strict=True)]


@with_config(ConfigDict(extra="forbid"))
class PolicyModel(TypedDict, total=False):
    """The model that a policy was made for. Tools compare all but the name, the runtime architecture and n_layer."""

    architecture: Annotated[Text, Field(min_length=1, description="a text that is not empty")]
    name: Text
    n_layer: Number
    fingerprint: Annotated[Text, Field(pattern="^[0-9a-f]{1,64}$", description="1 to 64 hex digits")]


@with_config(ConfigDict(extra="forbid"))
class PolicyLayer(TypedDict):
    """A layer and the windows of its KV heads."""

    layer: Number
    windows: Annotated[list[Window], Field(min_length=1, description="a list of one window per KV head")]


def _each_once(layers: list[PolicyLayer]) -> list[PolicyLayer]:
    seen = set()
    for i, entry in enumerate(layers):
        if entry["layer"] in seen:
            raise fault((i, "layer"), f"lists layer {entry['layer']} a second time")
        seen.add(entry["layer"])
    return layers


def _not_too_deep(provenance: dict[str, Any]) -> dict[str, Any]:
    if depth(provenance) >= MAX_DEPTH:
        raise fault((), f"is nested too deeply: at most {MAX_DEPTH - 1} levels expected")
    return provenance


class PolicyFile(BaseModel):
    """A policy: one window per KV head of each listed layer of a model. Layers that are not listed are full."""

    model_config = ConfigDict(extra="forbid", frozen=True, title=FORMAT)

    format: Literal["hwkv-policy"]
    version: Version
    model: PolicyModel | None = None
    n_sink: Number = 0
    layers: Annotated[list[PolicyLayer], AfterValidator(_each_once)]
    provenance: Annotated[dict[str, Any], AfterValidator(_not_too_deep)] | None = None


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

    def __post_init__(self) -> None:
        if not isinstance(self.layers, dict):
            raise HwkvError(f"policy: layers is {show(self.layers)}, a dict of layer: windows expected")
        layers = []
        for il, row in self.layers.items():
            if isinstance(row, (str, bytes)) or not hasattr(row, "__iter__"):
                raise HwkvError(f"policy: windows of layer {show(il)} is {show(row)}, a sequence expected")
            layers.append({"layer": _integer(il), "windows": [FULL if w is None else _integer(w) for w in row]})
            if not layers[-1]["windows"]:
                raise HwkvError(f"policy: windows of layer {show(il)} is empty, one window per KV head expected")

        def name(place: tuple):
            match place:
                case ("layers", i, "windows", k):
                    return f"window {k} of layer {layers[i]['layer']}"
                case ("layers", _, "layer"):
                    return "layer"
                case ("model", key):
                    return f"key 'model.{key}'"
                case _:
                    return place[0]

        file = self._file(layers, name)
        rows = {x["layer"]: tuple(None if w == FULL else w for w in x["windows"]) for x in file.layers}
        object.__setattr__(self, "layers", dict(sorted(rows.items())))
        object.__setattr__(self, "n_sink", file.n_sink)
        object.__setattr__(self, "model", file.model)

    def _file(self, layers: list[dict[str, Any]], name: Callable[[tuple], str] | None = None) -> PolicyFile:
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "n_sink": _integer(self.n_sink),
            "layers": layers,
            "provenance": self.provenance,
        }
        return parse(PolicyFile, data, "policy", name)

    # JSON

    def to_file(self) -> PolicyFile:
        """The content of its file, as the format defines it."""
        layers = [{"layer": il, "windows": [FULL if w is None else w for w in row]} for il, row in self.layers.items()]
        return self._file(layers)

    def to_json(self) -> str:
        """The canonical text: fixed order of keys, one layer per line, a newline at the end."""
        lines = []
        for key, value in self.to_file():
            if key == "layers":
                rows = ",".join(f"\n    {to_line(row)}" for row in value)
                lines.append(f'  "layers": [{rows}' + ("\n  ]" if value else "]"))
            elif value is not None:
                lines.append(f'  "{key}": {to_line(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: object = "policy") -> "Policy":
        """Parses and checks a policy's text. `source` is the file that messages name."""
        check_size(len(text.encode(errors="surrogatepass")), source)
        file = parse(PolicyFile, parse_json(text, source), source)
        return cls({x["layer"]: x["windows"] for x in file.layers}, file.n_sink, file.model, file.provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Policy":
        """A policy from a JSON file, or the one embedded in a GGUF file."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise HwkvError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None
        for magic, read in CARRIERS.items():
            if data.startswith(magic):
                return read(path)
        check_size(len(data), path, status.st_size if stat.S_ISREG(status.st_mode) else "more")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HwkvError(f"{path}: not JSON: byte {error.start} is not UTF-8 text") from None
        return cls.from_json(text, path)

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Writes the canonical JSON, whole or not at all."""
        data = self.to_json().encode()
        check_size(len(data), path)
        with replacing(path, overwrite) as file:
            file.write(data)

    # meaning

    def check(self, geometry: ModelShape, source: object = "policy") -> None:
        """Passes if the policy fits the model and this version's runtime; HwkvError says why not."""
        model = self.model or {}
        for key, actual in geometry.describe().items():
            if key != "name" and key in model and model[key] != actual:
                raise HwkvError(
                    f"{source}: made for another model: key 'model.{key}' is {show(model[key])},"
                    f" {show(actual)} expected ({geometry.name})"
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

    def row(self, layer: LayerShape) -> tuple[int | None, ...]:
        """Windows of the KV heads of a Layer, full where the policy does not list it."""
        return self.layers.get(layer.layer, (None,) * layer.n_head_kv)

    def retention(self, n_tokens: int, geometry: ModelShape | None = None) -> float:
        """Nominal share of KV cells kept after n_tokens, 0 to 1: the mean over KV heads of min(T, w + n_sink) / T.

        Over all configurable layers of the geometry; without one, over the listed layers only.
        """
        if n_tokens < 1:
            raise HwkvError(f"retention is asked at {n_tokens} tokens, at least 1 expected")
        rows = self.layers.values() if geometry is None else [self.row(layer) for layer in geometry.configurable]
        kept = [n_tokens if w is None else min(n_tokens, w + self.n_sink) for row in rows for w in row]
        return sum(kept) / (n_tokens * len(kept)) if kept else 1.0

    def fingerprint(self, n_layer: int) -> str:
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

    def summary(self, geometry: ModelShape) -> str:
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


def check_size(n_bytes: int, source: object, shown: object = None) -> None:
    """HwkvError if a policy's JSON is larger than any can be: it is not parsed then."""
    if n_bytes > MAX_FILE_BYTES:
        raise HwkvError(f"{source}: not a policy: it has {shown or n_bytes} bytes, at most {MAX_FILE_BYTES} expected")


def _integer(value: Any) -> Any:
    """NumPy's integers as Python's, anything else as it is."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value
