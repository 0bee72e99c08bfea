"""Traces: the texts that calibration looks at, and the held-out texts that it is judged by.

The default trace ships with the package (written for it, under its licence): prose, technical text and code, and a
generated retrieval text whose second half asks for facts of its first. Half of the documents make traces, the others
are held out. Text like the workload is better: from_files() takes it.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.names import as_text
from ..errors import HwkvError
from ..runtime import native
from ..runtime.context import Model

Tokens = npt.NDArray[np.int32]  # [n_token]

FOLDER = Path(__file__).parent / "texts"
N_PROSE = 8  # files 01 to 08 are prose, the others technical


@dataclass(frozen=True)
class Trace:
    """Token sequences.

    sequences: to calibrate on, all of one length. held_out: to measure on, from other text.
    source: what they were made from, for provenance. JSON values.
    """

    sequences: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    source: dict[str, Any]

    @property
    def sha256(self) -> str:
        """64 hex digits, of the lengths and tokens of the calibration sequences."""
        return _sha256(self.sequences)

    @property
    def held_out_sha256(self) -> str:
        """The same of the held-out sequences."""
        return _sha256(self.held_out)


def default(model: Model, n_tokens: int, seed: int = 0) -> Trace:
    """Three sequences of n_tokens, and three held out. In each three: prose first, technical text first, and retrieval.

    HwkvError if the shipped text is too short.
    """
    rng = np.random.default_rng(seed)
    files = sorted(FOLDER.glob("*.txt"))
    prose, technical = (
        [files[i] for i in rng.permutation(n) + first] for first, n in ((0, N_PROSE), (N_PROSE, len(files) - N_PROSE))
    )
    halves = [(prose[i::2], technical[i::2]) for i in (0, 1)]  # to calibrate on, to measure on

    def sequences(prose: Sequence[Path], technical: Sequence[Path]) -> tuple[Tokens, ...]:
        texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in (prose, technical)]
        first, second = (model.tokenize("\n\n".join(order)) for order in (texts[0] + texts[1], texts[1] + texts[0]))
        n_tokens_there = min(len(first), len(second)) + len(_start(model))
        if n_tokens_there < n_tokens:
            raise HwkvError(
                f"the default trace has {n_tokens_there} tokens in this model's vocabulary, {n_tokens} are asked for:"
                " give text of your own with --text, or a lower --trace-tokens"
            )
        return _cut(model, [first, second, retrieval(model, texts[0] + texts[1], n_tokens, rng)], n_tokens)

    traces, held_out = (sequences(*half) for half in halves)
    return Trace(traces, held_out, {"text": "default", "seed": seed})


def from_files(
    model: Model,
    paths: Iterable[str | Path],
    n_tokens: int,
    n_sequences: int = 3,
    held_out_paths: Iterable[str | Path] = (),
) -> Trace:
    """Up to n_sequences of n_tokens each from the files, in order.

    Held out are the first n_tokens of held_out_paths; without these, the last n_tokens of the files. HwkvError if a
    file cannot be read, or there is too little text.
    """
    paths, held_out_paths = list(paths), list(held_out_paths)
    tokens = _read(model, paths)
    if held_out_paths:
        held_out = _read(model, held_out_paths)
        if len(held_out) < n_tokens // 2:
            raise HwkvError(
                f"{_names(held_out_paths)}: {len(held_out)} tokens, at least {n_tokens // 2} expected to measure on"
            )
        held_out = held_out[:n_tokens]
    else:
        held_out, tokens = tokens[-n_tokens:], tokens[:-n_tokens]
    n = min(n_sequences, len(tokens) // n_tokens)
    if n < 1:
        found = len(tokens) + (0 if held_out_paths else len(held_out))
        needed = (
            f"{n_tokens} for a trace"
            if held_out_paths
            else f"{2 * n_tokens}, half to calibrate on and half to measure on,"
        )
        raise HwkvError(
            f"{_names(paths)}: {found} tokens, at least {needed} expected: give more text or a lower --trace-tokens"
        )
    sequences = [tokens[i * n_tokens : (i + 1) * n_tokens] for i in range(n)]
    return Trace(
        _cut(model, sequences, n_tokens),
        _cut(model, [held_out], n_tokens),
        {
            "text": [as_text(Path(path).name) for path in paths],
            "held_out": [as_text(Path(path).name) for path in held_out_paths] or "end of text",
        },
    )


def retrieval(model: Model, texts: Iterable[str], n_tokens: int, rng: np.random.Generator) -> Tokens:
    """At least n_tokens of a text that states facts in its first half and asks for them in its second.

    Between them stand paragraphs of the texts.
    """
    paragraphs = [p for text in texts for p in text.split("\n") if 80 < len(p) < 900]
    things = [
        "locker",
        "parcel",
        "ticket",
        "account",
        "gate",
        "engine",
        "sample",
        "crate",
        "permit",
        "meter",
        "folder",
        "bicycle",
    ]
    owners = [
        "Amara",
        "Bertil",
        "Chiara",
        "Dmitri",
        "Eszter",
        "Farid",
        "Greta",
        "Hiro",
        "Ingrid",
        "Jonas",
        "Kalinda",
        "Lorenzo",
    ]
    facts = [(f"{owner}'s {thing}", f"{rng.integers(10_000, 100_000)}") for owner in owners for thing in things]
    facts = [facts[i] for i in rng.permutation(len(facts))]
    tokens: list[Tokens] = []
    stated: list[tuple[str, str]] = []

    def add(text: str) -> None:
        tokens.append(model.tokenize(text))

    def length() -> int:
        return sum(map(len, tokens))

    while length() < n_tokens // 2:
        add(f"{paragraphs[rng.integers(len(paragraphs))]}\n")
        if facts:
            stated.append(facts.pop())
            add(f"Note: the number of {stated[-1][0]} is {stated[-1][1]}.\n")
    while length() < n_tokens:
        for _ in range(3):
            what, number = stated[rng.integers(len(stated))]
            add(f"Question: what is the number of {what}? Answer: {number}.\n")
        add(f"{paragraphs[rng.integers(len(paragraphs))]}\n")
    return np.concatenate(tokens)


def sample_positions(sequences: Iterable[Tokens], n_queries: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Positions of the queries to score [n_query] in each token sequence, ascending, without repeats.

    They are drawn from its second half, where long histories exist; where that is shorter than n_queries, all of it.
    """
    rng = np.random.default_rng(seed)
    result = []
    for sequence in sequences:
        first = len(sequence) // 2
        result.append(
            first + np.sort(rng.choice(len(sequence) - first, min(n_queries, len(sequence) - first), replace=False))
        )
    return result


def _start(model: Model) -> list[int]:
    """The start token, where the model wants one."""
    llama_cpp = native.load()
    return [llama_cpp.llama_vocab_bos(model.vocab)] if llama_cpp.llama_vocab_get_add_bos(model.vocab) else []


def _cut(model: Model, sequences: Iterable[Tokens], n_tokens: int) -> tuple[Tokens, ...]:
    """n_tokens of each, the start token first."""
    return tuple(np.concatenate([_start(model), sequence])[:n_tokens].astype(np.int32) for sequence in sequences)


def _read(model: Model, paths: Iterable[str | Path]) -> Tokens:
    """The tokens of all files, one after the other."""
    parts = []
    for path in paths:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise HwkvError(f"{path}: cannot read: {error.strerror}") from None
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HwkvError(f"{path}: not text: byte {error.start} is not UTF-8") from None
        if not text.strip():
            raise HwkvError(f"{path}: the file is empty, text expected")
        if re.search("[\x00-\x08\x0e-\x1a]", text):
            raise HwkvError(f"{path}: not text: it holds control characters")
        parts.append(model.tokenize(text))
    return np.concatenate(parts)


def _names(paths: Iterable[str | Path]) -> str:
    return ", ".join(map(str, paths))


def _sha256(sequences: Iterable[Tokens]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(f"{len(sequence)}\n".encode() + sequence.astype("<i4").tobytes())
    return digest.hexdigest()
