"""SeqCalib: the windows of each layer are chosen with the lower layers already under theirs (HeadWiseKV, arXiv 2609.02029).

For each threshold tau the configurable layers are taken in execution order. The trace runs through the real runtime up to the layer's
attention, the layers below under the windows chosen for them; every candidate window is replayed on the captured queries; each KV head
gets the shortest window whose mean score is at least tau; and the same run goes on under this row. Thresholds that chose the same rows
so far share the work: together they form a tree, walked depth first.

Each layer that was scored, and whose replay was found to be what the runtime attends, is a file in the run folder. A calibration that was
interrupted reads what is there and goes on; the rows follow from the files alone, so the result is that of an undisturbed run.
"""

import hashlib
import importlib.metadata
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import __version__
from .atomic import replacing
from .distortion import Distortion, DistortionMeter
from .errors import HwkvError
from .layerwise import END, START, Layerwise
from .policy import Policy
from .replay import replay
from .scores import LayerScores, shortest_window, stabilised_cosine
from .trace import sample_positions

TAUS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# Squared error of the replayed attention output against the runtime's, relative to the output's energy. The runtime sums V in half
# precision on some backends, and rounds Q to 8 bits for quantised K.
TOLERANCE = {True: 2e-3, False: 2e-2}  # K and V as F32, F16 or BF16: True
ELSEWHERE = "remove the folder or name another one with --run"


@dataclass(frozen=True)
class Settings:
    """What a calibration is asked for. windows None: powers of two from 256 to half of the trace."""

    taus: tuple[float, ...] = TAUS
    sinks: tuple[int, ...] = (0,)  # numbers of first positions that every window sees; each is calibrated by itself
    windows: tuple[int, ...] | None = None
    n_queries: int = 128  # of each trace sequence
    seed: int = 0

    def __post_init__(self):
        for tau in self.taus:
            if not 0 < tau <= 1:
                raise HwkvError(f"tau is {tau}, a number above 0 and up to 1 expected")
        if not self.taus:
            raise HwkvError("no tau is given, at least one expected")
        if not self.sinks or min(self.sinks) < 0:
            raise HwkvError(f"n_sink is {min(self.sinks, default='not given')}, 0 or more expected")
        if self.n_queries < 1:
            raise HwkvError(f"n_queries is {self.n_queries}, at least 1 expected")

    def candidates(self, n_tokens):
        """The candidate windows for traces of n_tokens, ascending."""
        if self.windows is None:
            windows = [2**i for i in range(8, 31) if 2**i <= n_tokens // 2]
            if not windows:
                raise HwkvError(f"the trace has {n_tokens} tokens, too few for the shortest window, 256: at least 512 expected, or other --windows")
            return windows
        for w in self.windows:
            if not 1 <= w <= n_tokens // 2:
                raise HwkvError(f"window {w} cannot be judged on a trace of {n_tokens} tokens: 1 to {n_tokens // 2} expected")
        return sorted(set(self.windows))


@dataclass(frozen=True)
class Record:
    """The result of one threshold and number of sinks.

    retention: {n_tokens: share of KV cells kept}. mean_score: over the KV heads, of the window that each got (full: 1).
    distortion: of the policy on the held-out text, see distortion.Distortion. seconds: what its layers took, shared ones included.
    """

    tau: float
    n_sink: int
    policy: Policy
    retention: dict[int, float]
    mean_score: float
    distortion: dict
    seconds: float

    def to_json(self):
        data = {**asdict(self), "policy": json.loads(self.policy.to_json())}
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_data(cls, data):
        Distortion(**data["distortion"])
        return cls(**{**data, "policy": Policy.from_json(json.dumps(data["policy"])), "retention": {int(n): x for n, x in data["retention"].items()}})


def calibrate(model, geometry, trace, folder, settings=Settings(), *, lengths=(), model_sha256=None, progress=True):
    """Records of all thresholds and numbers of sinks, in the order of settings.sinks and then of settings.taus.

    model: a runtime.Model; geometry: its ModelGeometry; trace: a trace.Trace; folder: where the run keeps its files.
    lengths: token counts at which retention is recorded, besides the trace's own.
    HwkvError if the folder holds another calibration, or if a replayed attention output is not the runtime's.
    """
    check_model(geometry)
    run = _Run(model, geometry, trace, Path(folder), settings, model_sha256, progress)
    with run:
        sinks, taus = dict.fromkeys(settings.sinks), dict.fromkeys(settings.taus)  # each once
        rows = {n_sink: run.rows(n_sink) for n_sink in sinks}
        lengths = sorted({*lengths, len(trace.sequences[0])})
        return [run.record(tau, n_sink, rows[n_sink][tau], lengths) for n_sink in sinks for tau in taus]


def check_model(geometry):
    """HwkvError if no layer of the model can be calibrated."""
    if geometry.refusal:
        raise HwkvError(f"no policy fits a model of architecture {geometry.architecture}: {geometry.refusal}")
    if not geometry.configurable:
        raise HwkvError("the model has no layer that takes windows: there is nothing to calibrate")


class _Run:
    def __init__(self, model, geometry, trace, folder, settings, model_sha256, progress):
        self.model, self.geometry, self.trace, self.folder, self.settings = model, geometry, trace, folder, settings
        self.layers = geometry.configurable
        self.n_tokens = len(trace.sequences[0])
        self.windows = settings.candidates(self.n_tokens)
        self.samples = sample_positions(trace, settings.n_queries, settings.seed)
        self.walker = None
        self.meter = None
        self.progress = progress
        self.identity = {
            "method": "seqcalib", "n_ctx": self.n_tokens, "windows": self.windows, "n_queries": settings.n_queries, "seed": settings.seed,
            "trace": trace.source, "trace_sha256": trace.sha256, "held_out_sha256": trace.held_out_sha256,
            "model_fingerprint": geometry.fingerprint, **({"model_sha256": model_sha256} if model_sha256 else {}),
            "type_k": model.options.type_k, "type_v": model.options.type_v, "n_ubatch": model.options.n_ubatch,
            "hwkv": __version__, "llama_cpp_python": importlib.metadata.version("llama-cpp-python"), "numpy": np.__version__,
        }
        self._open_folder()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in (self.walker, self.meter):
            if part:
                part.close()

    def _open_folder(self):
        path = self.folder / "run.json"
        text = json.dumps(self.identity, indent=1, ensure_ascii=False) + "\n"
        try:
            (self.folder / "layers").mkdir(parents=True, exist_ok=True)
            (self.folder / "records").mkdir(exist_ok=True)
        except OSError as error:
            raise HwkvError(f"{self.folder}: cannot write: {error.strerror}") from None
        if not path.exists():
            return _write(path, text)
        held = _read(path, dict, ELSEWHERE)
        for key in {**held, **self.identity}:
            if held.get(key) != self.identity.get(key):
                raise HwkvError(f"{self.folder}: holds another calibration: its {key} is {held.get(key)}, now it is {self.identity.get(key)};"
                                f" {ELSEWHERE}")

    # the tree of thresholds

    def rows(self, n_sink):
        """{tau: rows of all configurable layers}."""
        self.n_sink = n_sink
        if self.walker:
            self.walker.restart(n_sink)
        leaves = {}
        taus = sorted(set(self.settings.taus), reverse=True)
        with tqdm(total=len(taus) * len(self.layers), unit="layer", disable=not self.progress, desc=f"calibrate, n_sink {n_sink}") as bar:
            self._descend((), taus, leaves, bar)
        return leaves

    def _descend(self, rows, taus, leaves, bar):
        if len(rows) == len(self.layers):
            if self.walker:
                self.walker.confirm(rows)
            leaves.update((tau, rows) for tau in taus)
            return
        layer = self.layers[len(rows)]
        bar.set_postfix_str(f"layer {layer.layer}, tau {' '.join(f'{tau:g}' for tau in taus)}")
        scores, outputs, save = self._scores(rows)
        groups = {}
        for tau in taus:
            groups.setdefault(tuple(shortest_window(scores.mean[h], self.windows, tau) for h in range(layer.n_head_kv)), []).append(tau)
        bar.update(len(taus))
        forked = len(groups) > 1 and self.walker and self.walker.keep(rows)
        if outputs is not None:
            for row in groups:
                self.walker.expect(rows + (row,), self._chosen(outputs, row), save)
            del outputs  # of all windows: the layers above have their own
        for row, members in groups.items():
            self._descend(rows + (row,), members, leaves, bar)
        if forked:
            self.walker.forget(rows)

    def _layer_file(self, n_sink, rows):
        key = hashlib.sha256(json.dumps([n_sink, rows]).encode()).hexdigest()[:16]
        return self.folder / "layers" / f"{self.layers[len(rows)].layer:03d}-{key}.json"

    def _scores(self, rows):
        """(LayerScores of the layer above these rows, its replayed outputs, a call that saves the scores; None twice where they are on disk)."""
        layer = self.layers[len(rows)]
        path = self._layer_file(self.n_sink, rows)
        if path.exists():
            return self._saved_scores(layer, path)[0], None, None
        start = time.monotonic()
        if self.walker is None:
            self.walker = _Walker(Layerwise(self.model, list(self.trace.sequences), self.samples), self.layers, self._tolerance(), self.n_sink)
        self.walker.go(rows)
        outputs = self._replay(layer)
        cosines = [np.concatenate([stabilised_cosine(out) for out in traces]) for traces in outputs]
        scores = LayerScores.from_cosines(layer.layer, self.windows, self.n_sink, cosines)
        if not np.isfinite(scores.mean).all():
            raise HwkvError(f"layer {layer.layer}: the attention output on the trace holds values that are no numbers, so no window can be judged")
        text = json.dumps({"scores": scores.to_dict(), "seconds": round(time.monotonic() - start, 3)}) + "\n"
        return LayerScores.from_dict(scores.to_dict()), outputs, partial(_write, path, text)  # the scores as a resumed run reads them

    def _saved_scores(self, layer, path):
        """(LayerScores, seconds) of a layer's file."""
        def parse(data):
            scores, seconds = LayerScores.from_dict(data["scores"]), float(data["seconds"])
            if (scores.layer, scores.windows, len(scores.mean)) != (layer.layer, tuple(self.windows), layer.n_head_kv):
                raise HwkvError(f"scores of layer {scores.layer} with {len(scores.mean)} KV heads and windows {list(scores.windows)}; layer"
                                f" {layer.layer} with {layer.n_head_kv} and {self.windows} expected")
            return scores, seconds

        return _read(path, parse)

    def _replay(self, layer):
        """Outputs [n_window + 1, n_query, n_gqa, head_dim_v] for each KV head and, inside, each trace."""
        layerwise = self.walker.layerwise
        attention = layerwise.attention()
        queries = layerwise.queries(layer)
        n_gqa = layer.n_head // layer.n_head_kv
        result = []
        for h in range(layer.n_head_kv):
            group = slice(h * n_gqa, (h + 1) * n_gqa)
            sinks = attention["sinks"]
            result.append([
                replay(queries[i][:, group], self.samples[i], *layerwise.keys_values(layer, h, i), self.windows, scale=attention["scale"],
                       n_sink=self.n_sink, softcap=attention["softcap"], sinks=None if sinks is None else sinks[group])
                for i in range(len(self.trace.sequences))])
        return result

    def _chosen(self, outputs, row):
        """Attention output under a row, all traces in one array [n_query, n_head, head_dim_v]."""
        index = [len(self.windows) if w is None else self.windows.index(w) for w in row]
        return np.concatenate([np.concatenate([out[i] for out in traces]) for i, traces in zip(index, outputs)], axis=1)

    def _tolerance(self):
        return TOLERANCE[{self.model.options.type_k, self.model.options.type_v} <= {"f32", "f16", "bf16"}]

    # records

    def record(self, tau, n_sink, rows, lengths):
        """The Record; measured now, or read where it was measured before."""
        path = self.folder / "records" / f"sink{n_sink}-tau{tau}.json"
        policy = Policy({layer.layer: row for layer, row in zip(self.layers, rows)}, n_sink, model=self.geometry.describe(),
                        provenance={**self.identity, "tau": tau})
        retention = {n: round(policy.retention(n, self.geometry), 6) for n in lengths}
        if path.exists():
            held = _read(path, Record.from_data)
            if held.policy == policy and held.retention == retention:
                return held
        score, seconds = [], 0.0
        for k, row in enumerate(rows):
            scores, spent = self._saved_scores(self.layers[k], self._layer_file(n_sink, rows[:k]))
            score += [1.0 if w is None else scores.mean[h][self.windows.index(w)] for h, w in enumerate(row)]
            seconds += spent
        if self.meter is None:
            if self.walker:
                self.walker.close()  # its context holds the traces; the measurement needs the room
                self.walker = None
            self.meter = DistortionMeter(self.model, self.trace.held_out)
        record = Record(tau, n_sink, policy, retention, float(f"{np.mean(score):.7g}"), self.meter.measure(policy).to_dict(), round(seconds, 3))
        _write(path, record.to_json())
        return record


class _Walker:
    """Brings the runtime to the attention of a layer, with given windows below it, in as few runs as it can."""

    def __init__(self, layerwise, layers, tolerance, n_sink):
        self.layerwise, self.layers, self.tolerance = layerwise, layers, tolerance
        self.restart(n_sink)

    def restart(self, n_sink):
        """From here on with another number of sinks."""
        self.n_sink = n_sink
        self.at = None      # rows below the layer that the last run ended at
        self.kept = {}      # rows -> number of the saved state
        self.computed = {}  # depth -> rows under which the K and V in the cache of that layer were computed
        self.expected = {}  # rows -> replayed output of the last of them, and what to call when the runtime's is the same

    def close(self):
        self.layerwise.close()

    def go(self, rows):
        """To the attention of the layer above these rows."""
        if self.at != rows:
            start = max((known for known in (self.at, *self.kept) if known is not None and known == rows[:len(known)]
                         and self.computed[len(known)] == known), key=len, default=None)
            if start is None:
                self._run(START, self.layers[0].layer, ())
            elif start != self.at:
                self.layerwise.restore(self.kept[start])
                self.at = start
        while len(self.at) < len(rows):
            depth = len(self.at)
            layer, row = self.layers[depth], rows[depth]
            self.layerwise.set_windows(layer.layer, row, self.n_sink)
            self._run(layer.layer, self.layers[depth + 1].layer if depth + 1 < len(self.layers) else END, rows[:depth + 1])
            self._check(layer, rows[:depth + 1])

    def confirm(self, rows):
        """Runs the last layer's attention under its row too, only to compare it with the replay."""
        if rows in self.expected:
            self.go(rows)

    def keep(self, rows):
        """Saves the state here, to come back to it. False if the run is elsewhere."""
        if self.at == rows:
            self.kept[rows] = self.layerwise.save()
        return self.at == rows

    def forget(self, rows):
        self.layerwise.drop(self.kept.pop(rows))

    def expect(self, rows, output, agreed):
        """What the attention of the last of these rows gives, by the replay; agreed() is called when the runtime's is the same."""
        self.expected[rows] = output, agreed

    def _run(self, start, end, rows):
        self.layerwise.run(start, end)
        self.at = rows
        self.computed[len(rows)] = rows

    def _check(self, layer, rows):
        if rows not in self.expected:
            return
        expected, agreed = self.expected.pop(rows)
        actual = np.concatenate(self.layerwise.outputs(layer))
        error = float(((actual - expected)**2).sum(dtype=np.float64) / (expected**2).sum(dtype=np.float64))
        if not error <= self.tolerance:
            raise HwkvError(f"layer {layer.layer}: the replayed attention output is not the runtime's: relative squared error {error:.2g},"
                            f" at most {self.tolerance:g} expected; the captured Q, K and V are not what the layer attends")
        agreed()


def _write(path, text):
    with replacing(path, overwrite=True) as file:
        file.write(text.encode())


def _read(path, parse, advice="remove it, and it is made again"):
    """parse() of the JSON in a file of the run folder."""
    def constant(name):
        raise ValueError(f"{name} is not a JSON value")

    try:
        return parse(json.loads(path.read_text(encoding="utf-8"), parse_constant=constant))
    except (HwkvError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else error
        raise HwkvError(f"{path}: not a file of this calibration: {reason}; {advice}") from None
