"""What a policy may keep at a context length: a share of the cells, or bytes of the KV cache."""

from dataclasses import dataclass, field

from ..errors import HwkvError
from .footprint import predict


@dataclass(frozen=True)
class Budget:
    """Either retention, a share of the cells at n_ctx tokens from 0 to 1, or budget_bytes.

    Bytes are those that footprint.predict counts for one sequence of n_ctx tokens; context: its further arguments.
    HwkvError if it is not exactly one of the two, or outside of its range.
    """

    n_ctx: int
    retention: float | None = None
    budget_bytes: int | None = None
    context: dict = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if (self.retention is None) == (self.budget_bytes is None):
            raise HwkvError("a budget is either a retention or a number of bytes")
        if self.n_ctx < 1:
            raise HwkvError(f"a budget is set at {self.n_ctx} tokens, at least 1 expected")
        if self.retention is not None and not 0 < self.retention <= 1:
            raise HwkvError(f"a budget has a retention of {self.retention}, above 0 and at most 1 expected")

    def cost(self, geometry, policy):
        """What the policy keeps, in the unit of the budget: a share of the cells, or bytes."""
        if self.retention is not None:
            return policy.retention(self.n_ctx, geometry)
        return predict(geometry, policy, self.n_ctx, **self.context).kv_bytes

    def holds(self, geometry, policy):
        """True if the policy keeps no more than this."""
        limit = self.retention if self.retention is not None else self.budget_bytes
        return self.cost(geometry, policy) <= limit

    def shows(self, geometry, policy):
        """What the policy keeps and what it may, for messages."""
        if self.retention is not None:
            kept, limit = f"a retention of {policy.retention(self.n_ctx, geometry):.4g}", f"{self.retention:g}"
        else:
            kept, limit = (
                f"{predict(geometry, policy, self.n_ctx, **self.context).kv_bytes:,} bytes",
                f"{self.budget_bytes:,}",
            )
        return f"{kept} at {self.n_ctx:,} tokens, at most {limit} expected"

    @property
    def name(self):
        """For files."""
        return (
            f"keep{self.retention}-at{self.n_ctx}"
            if self.retention is not None
            else f"bytes{self.budget_bytes}-at{self.n_ctx}"
        )

    def describe(self):
        """For a policy's provenance."""
        limit = {"retention": self.retention} if self.retention is not None else {"budget_bytes": self.budget_bytes}
        return {**limit, "n_ctx": self.n_ctx}
