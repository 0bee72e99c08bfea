"""How far a policy moves a model's next-token distributions from those with full KV, measured through the runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import HwkvError
from ..policy.policy import Policy
from ..runtime.context import Model
from .files import KNOWN_KEYS, Count, Number, Share


@dataclass(frozen=True)
class Distortion:
    """Over the evaluated positions of held-out texts, against full KV. Divergences in nats."""

    __pydantic_config__ = KNOWN_KEYS

    kl: Number  # mean KL(full || policy)
    kl_stderr: Number  # standard error of that mean, positions taken as independent
    kl_p99: Number
    top1: Share  # share of positions whose likeliest token is the same
    nll: Number  # mean negative log-likelihood of the text's own next token under the policy
    nll_full: Number  # and with full KV
    n_tokens: Count  # of the texts
    n_positions: Count  # evaluated

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Floats have 7 significant digits."""
        return {
            name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }


class DistortionMeter:
    """Compares policies with full KV on texts. Close it, or use it in a with statement.

    texts: int32 token arrays [n_token], each decoded by itself. Evaluated are n_positions of each text, evenly spread
    over its second half, where histories are long. The distributions with full KV are computed once and kept in a
    temporary file. HwkvError if a text is too short.
    """

    def __init__(self, model: Model, texts: Sequence[npt.NDArray[np.int32]], n_positions: int = 256) -> None:
        for tokens in texts:
            if len(tokens) < 4:
                raise HwkvError(f"a held-out text has {len(tokens)} tokens, at least 4 expected")
        self.model = model
        self.texts = texts
        self.positions = [_spread(len(tokens) // 2, len(tokens) - 1, n_positions) for tokens in texts]
        self.targets = np.concatenate([tokens[at + 1] for tokens, at in zip(texts, self.positions)])
        self._stack = ExitStack()
        self._full: np.memmap | None = None  # log-probabilities [n_position, n_vocab] float32

    def close(self) -> None:
        """Removes the temporary file."""
        self._stack.close()

    def __enter__(self) -> DistortionMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, policy: Policy | None, model: Model | None = None) -> Distortion:
        """Distortion of a Policy, or of full KV (None).

        model: another Model of the same weights that serves it, such as one with other K/V types. HwkvError if the
        distributions cannot be written, or logits are no numbers.
        """
        n = len(self.targets)
        if self._full is None:
            try:  # written, not mapped: a full disk is then an error, and not a signal
                file = self._stack.enter_context(tempfile.NamedTemporaryFile(suffix=".logits"))
                for _, log_p in self._distributions(self.model, None):
                    file.write(log_p.tobytes())
                file.flush()
            except OSError as error:
                raise HwkvError(
                    f"{tempfile.gettempdir()}: cannot write the distributions with full KV,"
                    f" {4 * n * self.model.n_vocab:,} bytes: {error.strerror}"
                ) from None
            self._full = np.memmap(file, dtype=np.float32, mode="r", shape=(n, self.model.n_vocab))
        kl, same, nll, nll_full = (np.empty(n) for _ in range(4))
        for rows, log_q in self._distributions(model or self.model, policy):
            log_p = self._full[rows]
            kl[rows] = np.einsum("ij,ij->i", np.exp(log_p), log_p - log_q, dtype=np.float64)
            same[rows] = log_p.argmax(axis=1) == log_q.argmax(axis=1)
            nll[rows], nll_full[rows] = (-log[np.arange(len(log)), self.targets[rows]] for log in (log_q, log_p))
        if not np.isfinite(kl).all():
            raise HwkvError(
                "the logits on the held-out text hold values that are no numbers: the policy cannot be measured"
            )
        return Distortion(
            kl.mean(),
            kl.std() / np.sqrt(n),
            np.percentile(kl, 99),
            same.mean(),
            nll.mean(),
            nll_full.mean(),
            sum(map(len, self.texts)),
            n,
        )

    def _distributions(self, model: Model, policy: Policy | None) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
        """Yields (rows of the evaluated positions, their log-probabilities [n_row, n_vocab]), a ubatch at a time."""
        done = 0
        n_ubatch = model.options.n_ubatch
        for tokens, positions in zip(self.texts, self.positions):
            wanted = np.zeros(len(tokens), dtype=bool)
            wanted[positions] = True
            with model.context(policy, len(tokens)) as context:
                for first in range(0, len(tokens), n_ubatch):
                    part = slice(first, first + n_ubatch)
                    logits = context.decode(tokens[part], first, wanted[part])
                    if len(logits):
                        logits -= logits.max(axis=1, keepdims=True)
                        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
                        yield slice(done, done + len(logits)), logits
                        done += len(logits)


def _spread(start: int, end: int, n: int) -> npt.NDArray[np.int_]:
    """n numbers of range(start, end), evenly spread. All of them where there are no more."""
    n = min(n, end - start)
    return start + np.arange(n) * (end - start) // n
