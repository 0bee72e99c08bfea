"""Finds a policy for a GGUF: trace, method, records, selection."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import HwkvError
from ..gguf import digest
from ..gguf.geometry import ModelGeometry
from ..policy.budget import Budget
from ..runtime.context import Model, RuntimeOptions
from . import trace as traces
from .method import Method, methods
from .run import Record, Settings, check_model

BUDGET = 0.70  # the paper's policy of Qwen3.6-27B keeps 0.69


@dataclass(frozen=True)
class Calibration:
    """All records, and the one selected."""

    records: list[Record]
    selected: Record


def calibrate(
    model_path: str | Path,
    folder: str | Path,
    *,
    method: Method | str = "seqcalib",
    text: Iterable[Path] = (),
    held_out_text: Iterable[Path] = (),
    n_tokens: int = 4096,
    settings: Settings = Settings(),
    options: RuntimeOptions = RuntimeOptions(),
    budget: float | None = None,
    budget_bytes: int | None = None,
    n_ctx: int = 0,
    progress: bool = True,
) -> Calibration:
    """Calibrates a policy for the model and selects one record.

    folder: keeps the run; a later call with the same arguments goes on with it. method: a Method, or the name of one,
    which then has its defaults. text: files to calibrate on instead of the default trace. held_out_text: files to
    measure on. n_tokens: length of each trace. options: how the model will be served. budget (a share of the cells, 0
    to 1, BUDGET by default) or budget_bytes: the most that the policy may keep at n_ctx tokens (0: the trained
    context). HwkvError says what cannot be.
    """
    geometry = ModelGeometry.from_gguf(model_path)
    asked = asked_budget(geometry, options, budget, budget_bytes, n_ctx)
    method = named(method)
    records = find(
        model_path,
        geometry,
        folder,
        method=method,
        text=text,
        held_out_text=held_out_text,
        n_tokens=n_tokens,
        settings=settings,
        options=options,
        budget=asked,
        progress=progress,
    )
    return Calibration(records, method.select(records, geometry, asked))


def named(method: Method | str) -> Method:
    """The Method of that name, with its defaults. A Method is given back. HwkvError if none has the name."""
    if isinstance(method, Method):
        return method
    known = methods()
    if method not in known:
        raise HwkvError(f"no method is called {method!r}; there are {', '.join(known)}")
    return known[method]()


def asked_budget(
    geometry: ModelGeometry, options: RuntimeOptions, budget: float | None, budget_bytes: int | None, n_ctx: int
) -> Budget:
    """The Budget that a record is selected under. Arguments as calibrate()'s. HwkvError if both budgets are given."""
    if budget is not None and budget_bytes is not None:
        raise HwkvError("of a retention budget and a budget in bytes at most one can select")
    n_ctx = n_ctx or geometry.n_ctx_train
    if budget_bytes is None:
        return Budget(n_ctx, BUDGET if budget is None else budget)
    context = {"n_ubatch": options.n_ubatch, "type_k": options.type_k, "type_v": options.type_v}
    return Budget(n_ctx, None, budget_bytes, context)


def find(
    model_path: str | Path,
    geometry: ModelGeometry,
    folder: str | Path,
    *,
    method: Method,
    text: Iterable[Path],
    held_out_text: Iterable[Path],
    n_tokens: int,
    settings: Settings,
    options: RuntimeOptions,
    budget: Budget,
    progress: bool,
) -> list[Record]:
    """The records that calibrate() selects from. Arguments and errors as there."""
    check_model(geometry)
    if held_out_text and not text:
        raise HwkvError("held-out text without text to calibrate on: the default trace has its own")
    for n_sink in settings.sinks:
        settings.candidates(n_tokens, n_sink)
    if n_tokens > geometry.n_ctx_train:
        raise HwkvError(
            f"a trace of {n_tokens} tokens is asked for, but the model was trained with a context of"
            f" {geometry.n_ctx_train}: a lower --trace-tokens expected"
        )
    with Model(model_path, options) as model:
        if text:
            trace = traces.from_files(model, text, n_tokens, held_out_paths=held_out_text)
        else:
            trace = traces.default(model, n_tokens, settings.seed)
        return method.calibrate(
            model,
            geometry,
            trace,
            folder,
            settings,
            lengths=(budget.n_ctx, geometry.n_ctx_train),
            budget=budget,
            model_sha256=digest.of_model(model_path, progress),
            progress=progress,
        )
