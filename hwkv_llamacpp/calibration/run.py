"""A calibration at work: what every method is asked for and given, the folder that keeps the run, and its records."""

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, PlainSerializer

from .. import __version__
from ..base.formats import parse
from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import Layer, ModelGeometry
from ..policy.budget import Budget
from ..policy.policy import Policy
from ..runtime.context import Model
from .distortion import Distortion, DistortionMeter
from .files import KNOWN_KEYS, Count, Number, PolicyField, Share, Text, read, write
from .layerwise import Layerwise, Outputs
from .trace import Trace, sample_positions

if TYPE_CHECKING:
    from .method import Method

# Squared error of the replayed attention output against the runtime's, relative to the output's energy. The runtime
# sums V in half precision on some backends, and rounds Q to 8 bits for quantised K.
TOLERANCE = {True: 2e-3, False: 2e-2}  # K and V as F32, F16 or BF16: True
ELSEWHERE = "remove the folder or name another one with --run"


@dataclass(frozen=True)
class Settings:
    """What every method is asked for. windows None: powers of two from 256 to half of the trace, less n_sink."""

    sinks: tuple[int, ...] = (0,)  # numbers of first positions that every window sees; each is calibrated by itself
    windows: tuple[int, ...] | None = None
    n_queries: int = 128  # of each trace sequence
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sinks or min(self.sinks) < 0:
            raise HwkvError(f"n_sink is {min(self.sinks, default='not given')}, 0 or more expected")
        if self.n_queries < 1:
            raise HwkvError(f"n_queries is {self.n_queries}, at least 1 expected")

    def candidates(self, n_tokens: int, n_sink: int = 0) -> list[int]:
        """The candidate windows for traces of n_tokens, ascending. Powers of two are less n_sink, so that window and
        sinks fill whole cell blocks."""
        if self.windows is None:
            windows = [2**i - n_sink for i in range(8, 31) if n_sink < 2**i <= n_tokens // 2]
            if not windows:
                raise HwkvError(
                    f"the trace has {n_tokens} tokens, too few for the default windows: at least"
                    f" {max(512, 2 ** (n_sink.bit_length() + 1))} expected, or other --windows"
                )
            return windows
        for w in self.windows:
            if not 1 <= w <= n_tokens // 2:
                raise HwkvError(
                    f"window {w} cannot be judged on a trace of {n_tokens} tokens: 1 to {n_tokens // 2} expected"
                )
        return sorted(set(self.windows))


class RunFile(BaseModel):
    """run.json: what makes two runs the same run, besides the candidate windows that follow from it. A method adds keys
    of its own."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    method: Text
    n_ctx: Count
    windows: list[Count]
    n_queries: Count
    seed: Annotated[int, Field(strict=True)]
    trace: dict[str, Any]
    trace_sha256: Text
    held_out_sha256: Text
    model_fingerprint: Text
    model_sha256: Text | None = None
    type_k: Text
    type_v: Text
    n_ubatch: Count
    hwkv: Text
    llama_cpp_python: Text
    numpy: Text


# checked as a Distortion, kept as its dict
DistortionField = Annotated[
    dict[str, Any],
    GetPydanticSchema(lambda _, handler: handler(Distortion)),
    AfterValidator(asdict),
    PlainSerializer(lambda x: x),
]


@dataclass(frozen=True)
class Record:
    """One policy that a calibration found.

    setting: what was asked for, such as {"tau": 0.98} or {"budget": Budget.describe()}; the method's own keys.
    retention: {n_tokens: share of KV cells kept}. mean_score: over the KV heads, of the window that each got (full: 1);
    None where the method has no scores. distortion: of the policy on the held-out text, see distortion.Distortion.
    seconds: what finding it took, work that is shared with other records included.
    """

    __pydantic_config__ = KNOWN_KEYS

    setting: dict[str, Any]
    n_sink: Count
    policy: PolicyField
    retention: dict[int, Share]
    mean_score: Number | None
    distortion: DistortionField
    seconds: Number

    @property
    def label(self) -> str:
        """What was asked for, in few words."""
        words = []
        for key, value in self.setting.items():
            if key == "budget" and "retention" in value:
                words.append(f"keep {value['retention']:g}")
            elif key == "budget":
                words.append(f"{value['budget_bytes'] / 2**20:,.0f} MiB")
            else:
                words.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
        return ", ".join(words)

    @property
    def file_stem(self) -> str:
        """For the names of its files."""
        return f"sink{self.n_sink}-{re.sub(r'[^A-Za-z0-9.]', '', self.label)}"


def check_model(geometry: ModelGeometry) -> None:
    """HwkvError if no layer of the model can be calibrated."""
    if geometry.refusal:
        raise HwkvError(f"no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}")
    if not geometry.configurable:
        raise HwkvError("the model has no layer that takes windows: there is nothing to calibrate")


class CalibrationRun:
    """A calibration at work, and its folder: what a method is given. Close it, or use it in a with statement.

    layers: the configurable ones, in execution order. windows: {n_sink: candidates, ascending}. samples: the query
    positions of each trace sequence. budget: the Budget that was asked for, or None. HwkvError if the folder holds
    another calibration.
    """

    def __init__(
        self,
        method: "Method",
        model: Model,
        geometry: ModelGeometry,
        trace: Trace,
        folder: str | Path,
        settings: Settings = Settings(),
        *,
        lengths: Iterable[int] = (),
        budget: Budget | None = None,
        model_sha256: str | None = None,
        progress: bool = True,
    ) -> None:
        """method: a Method. lengths: token counts at which retention is recorded, besides the trace's own."""
        check_model(geometry)
        self.model, self.geometry, self.trace = model, geometry, trace
        self.folder, self.settings, self.budget, self.progress = Path(folder), settings, budget, progress
        self.layers = geometry.configurable
        self.n_tokens = len(trace.sequences[0])
        self.lengths = sorted({*lengths, self.n_tokens})
        self.sinks = tuple(dict.fromkeys(settings.sinks))
        self.windows = {n_sink: settings.candidates(self.n_tokens, n_sink) for n_sink in self.sinks}
        self.samples = sample_positions(trace.sequences, settings.n_queries, settings.seed)
        self.tolerance = TOLERANCE[{model.options.type_k, model.options.type_v} <= {"f32", "f16", "bf16"}]
        self._layerwise: Layerwise | None = None
        self._meter: DistortionMeter | None = None
        self._measured: dict[
            str, Distortion
        ] = {}  # fingerprint of a policy -> Distortion: thresholds often choose alike
        self.identity = {
            "method": method.name,
            "n_ctx": self.n_tokens,
            "windows": settings.candidates(self.n_tokens),
            "n_queries": settings.n_queries,
            "seed": settings.seed,
            **method.identity(trace),
            "trace": trace.source,
            "trace_sha256": trace.sha256,
            "held_out_sha256": trace.held_out_sha256,
            "model_fingerprint": geometry.fingerprint,
            **({"model_sha256": model_sha256} if model_sha256 else {}),
            "type_k": model.options.type_k,
            "type_v": model.options.type_v,
            "n_ubatch": model.options.n_ubatch,
            "hwkv": __version__,
            "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
            "numpy": np.__version__,
        }
        self._open_folder()

    def __enter__(self) -> "CalibrationRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.release()
        if self._meter:
            self._meter.close()

    def layerwise(self) -> Layerwise:
        """The traces in the runtime, to be run from layer to layer; made when it is first needed."""
        if self._layerwise is None:
            self._layerwise = Layerwise(self.model, list(self.trace.sequences), self.samples)
        return self._layerwise

    def release(self) -> None:
        """Frees the contexts that hold traces: measuring needs the room. The next layerwise() makes new ones."""
        if self._layerwise:
            self._layerwise.close()
            self._layerwise = None

    def path(self, name: str) -> Path:
        """Of a method's own file about layers."""
        return self.folder / "layers" / name

    def _open_folder(self) -> None:
        path = self.folder / "run.json"
        try:
            (self.folder / "layers").mkdir(parents=True, exist_ok=True)
            (self.folder / "records").mkdir(exist_ok=True)
        except OSError as error:
            raise HwkvError(f"{self.folder}: cannot write: {error.strerror}") from None
        parse(RunFile, self.identity, "the method's identity")
        if not path.exists():
            return write(path, self.identity, indent=1)
        held = read(path, RunFile, advice=ELSEWHERE).model_dump(exclude_unset=True)
        for key in {**held, **self.identity}:
            if held.get(key) != self.identity.get(key):
                raise HwkvError(
                    f"{self.folder}: holds another calibration: its {key} is {held.get(key)},"
                    f" now it is {self.identity.get(key)}; {ELSEWHERE}"
                )

    def record(
        self,
        rows: Iterable[WindowRow],
        n_sink: int,
        setting: dict[str, Any],
        cost: Callable[[], tuple[float | None, float]],
        name: str | None = None,
    ) -> Record:
        """The Record of a policy with these rows; measured now, or read where it was measured before.

        rows: windows of each configurable layer. setting: see Record. cost: a call that returns (mean score or None,
        seconds). name: of its file, less the sinks (default: the setting).
        """
        by_layer = {layer.layer: tuple(row) for layer, row in zip(self.layers, rows)}
        provenance = {**self.identity, "windows": self.windows[n_sink], **setting}
        policy = Policy(by_layer, n_sink, model=self.geometry.describe(), provenance=provenance)
        retention = {n: round(policy.retention(n, self.geometry), 6) for n in self.lengths}
        name = name or "-".join(f"{key}{value}" for key, value in setting.items())
        path = self.folder / "records" / f"sink{n_sink}-{name}.json"
        if path.exists():
            held = read(path, Record)
            if held.policy == policy and held.retention == retention:
                return held
        score, seconds = cost()
        if self._meter is None:
            self.release()
            self._meter = DistortionMeter(self.model, self.trace.held_out)
        key = policy.fingerprint(self.geometry.n_layer)
        if key not in self._measured:
            self._measured[key] = self._meter.measure(policy)
        record = Record(setting, n_sink, policy, retention, score, self._measured[key].to_dict(), round(seconds, 3))
        write(path, record, indent=1)
        return record


def check_replay(
    layer: Layer, expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32], tolerance: float
) -> None:
    """HwkvError if the attention output that was replayed is not the runtime's. Arrays of one shape."""
    error = float(((actual - expected) ** 2).sum(dtype=np.float64) / (expected**2).sum(dtype=np.float64))
    if not error <= tolerance:
        raise HwkvError(
            f"layer {layer.layer}: the replayed attention output is not the runtime's: relative squared error"
            f" {error:.2g}, at most {tolerance:g} expected; the captured Q, K and V are not what the layer attends"
        )


def chosen(outputs: Outputs, row: WindowRow, windows: Sequence[int]) -> npt.NDArray[np.float32]:
    """Attention output under a row of windows, all traces in one array [n_query, n_head, head_dim_v]. outputs: of
    Layerwise.replay()."""
    index = [len(windows) if w is None else windows.index(w) for w in row]
    return np.concatenate([np.concatenate([out[i] for out in traces]) for i, traces in zip(index, outputs)], axis=1)
