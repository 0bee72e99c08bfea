"""Which record of a calibration is deployed: by threshold, or the least distortion under a budget."""

from collections.abc import Sequence

from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.budget import Budget
from .run import Record


def by_tau(records: Sequence[Record], tau: float) -> Record:
    """The record of a threshold. Of several with different numbers of sinks, the one of least distortion.

    HwkvError if there is none.
    """
    matching = [r for r in records if r.setting.get("tau") == tau]
    if not matching:
        raise HwkvError(f"no record has tau {tau:g}; there are {', '.join(r.label for r in records)}")
    return min(matching, key=lambda r: r.distortion["kl"])


def within(records: Sequence[Record], geometry: ModelGeometry, budget: Budget) -> Record:
    """The record of least measured KL among those that a Budget holds.

    Of equals it is the one of the lowest cost, then the one of the largest tau. HwkvError if none fits.
    """
    fitting = [r for r in records if budget.holds(geometry, r.policy)]
    if not fitting:
        nearest = min(records, key=lambda r: budget.cost(geometry, r.policy))
        lower = " lower thresholds (--taus) or" if "tau" in nearest.setting else ""
        raise HwkvError(
            f"no record fits the budget: the nearest, {nearest.label}, is {budget.shows(geometry, nearest.policy)};"
            f"{lower} shorter --windows keep less"
        )
    return min(fitting, key=lambda r: (r.distortion["kl"], budget.cost(geometry, r.policy), -r.setting.get("tau", 0)))
