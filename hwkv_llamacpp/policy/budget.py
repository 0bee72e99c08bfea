"""What a policy may keep at a context length: a share of the cells, or bytes of the KV cache."""

from dataclasses import dataclass, field
from typing import Any

from ..base.shape import ModelShape
from ..errors import HwkvError
from .footprint import predict
from .policy import Policy


@dataclass(frozen=True)
class Budget:
    """Either retention, a share of the cells at n_ctx tokens from 0 to 1, or budget_bytes.

    Bytes are those that footprint.predict counts for one sequence of n_ctx tokens. context: further arguments of
    predict, such as {"type_k": "q8_0"}. HwkvError if not exactly one of the two is given, or one is out of range.
    """

    n_ctx: int
    retention: float | None = None
    budget_bytes: int | None = None
    context: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if (self.retention is None) == (self.budget_bytes is None):
            raise HwkvError("a budget is either a retention or a number of bytes")
        if self.n_ctx < 1:
            raise HwkvError(f"a budget is set at {self.n_ctx} tokens, at least 1 expected")
        if self.retention is not None and not 0 < self.retention <= 1:
            raise HwkvError(f"a budget has a retention of {self.retention}, above 0 and at most 1 expected")

    @property
    def limit(self) -> float:
        """The most that a policy may keep: a share of the cells, or bytes."""
        if self.retention is not None:
            return self.retention
        assert self.budget_bytes is not None  # __post_init__ has looked
        return self.budget_bytes

    def cost(self, geometry: ModelShape, policy: Policy) -> float:
        """What the policy keeps, in the unit of `limit`."""
        if self.retention is not None:
            return policy.retention(self.n_ctx, geometry)
        return predict(geometry, policy, self.n_ctx, **self.context).kv_bytes

    def holds(self, geometry: ModelShape, policy: Policy) -> bool:
        """True if the policy keeps no more than this."""
        return self.cost(geometry, policy) <= self.limit

    def shows(self, geometry: ModelShape, policy: Policy) -> str:
        """What the policy keeps and the most that it may keep, as part of a sentence."""
        if self.retention is not None:
            kept, limit = f"a retention of {policy.retention(self.n_ctx, geometry):.4g}", f"{self.retention:g}"
        else:
            kept, limit = (
                f"{predict(geometry, policy, self.n_ctx, **self.context).kv_bytes:,} bytes",
                f"{self.budget_bytes:,}",
            )
        return f"{kept} at {self.n_ctx:,} tokens, at most {limit} expected"

    @property
    def name(self) -> str:
        """A part of a file's name."""
        return (
            f"keep{self.retention}-at{self.n_ctx}"
            if self.retention is not None
            else f"bytes{self.budget_bytes}-at{self.n_ctx}"
        )

    def describe(self) -> dict[str, Any]:
        """What stands in a policy's provenance."""
        limit = {"retention": self.retention} if self.retention is not None else {"budget_bytes": self.budget_bytes}
        return {**limit, "n_ctx": self.n_ctx}
