"""The windows and budgets that baselines are asked for on the command line."""

import argparse
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from ..base import options, sizes
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.budget import Budget
from ..policy.policy import Policy


def sink_flag(command: argparse.ArgumentParser, default: int) -> None:
    """Adds --sink."""
    command.add_argument(
        "--sink",
        type=options.whole(0, "a number of tokens"),
        default=default,
        metavar="N",
        help="first tokens that every KV head keeps, too (default: %(default)s)",
    )


def window_flags(command: argparse.ArgumentParser) -> None:
    """Adds --window, --retention and --budget-bytes, one of which must be given, and -c."""
    group = command.add_mutually_exclusive_group(required=True)
    group.add_argument("--window", type=options.tokens, metavar="N", help="tokens that every KV head keeps")
    budget_flags(command, group)


def budget_flags(command: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Adds --retention and --budget-bytes to a group of the command, and -c to the command."""
    group.add_argument(
        "--retention",
        type=float,
        metavar="R",
        help="share of the cells to keep at the context of -c, 0 to 1: as much as fits",
    )
    group.add_argument(
        "--budget-bytes", type=sizes.parse, metavar="SIZE", help="KV memory to allocate there, such as 1.5GiB or 300MiB"
    )
    command.add_argument(
        "-c",
        "--ctx-size",
        type=options.tokens,
        metavar="N",
        help="context of --retention or --budget-bytes, with F16 K and V and one sequence (default: the trained one)",
    )


def asked_budget(args: argparse.Namespace, geometry: ModelGeometry) -> Budget | None:
    """The Budget of --retention or --budget-bytes at the context of -c; None if neither is given.

    Says on stderr where the context is longer than the model was trained for. HwkvError for -c alone.
    """
    if args.retention is None and args.budget_bytes is None:
        if args.ctx_size is not None:
            raise HwkvError("-c is the context of --retention or --budget-bytes; neither is given")
        return None
    geometry.warn_beyond(args.ctx_size or 0)
    return Budget(args.ctx_size or geometry.n_ctx_train, args.retention, args.budget_bytes)


def of_window(args: argparse.Namespace, geometry: ModelGeometry, make: Callable[[int], Policy]) -> Policy:
    """make(window) for --window, or for the largest window that the budget holds."""
    budget = asked_budget(args, geometry)
    return make(args.window) if budget is None else largest(geometry, budget, make)


def largest(geometry: ModelGeometry, budget: Budget, make: Callable[[int], Policy]) -> Policy:
    """make(window) for the largest window that the Budget holds, with the Budget in its provenance.

    HwkvError if not even a window of 1 token fits.
    """
    window = bisect_left(range(1, budget.n_ctx + 1), True, key=lambda w: not budget.holds(geometry, make(w)))
    if not window:
        raise HwkvError(f"no window fits: 1 token per KV head is {budget.shows(geometry, make(1))}")
    policy = make(window)
    return replace(policy, provenance={**(policy.provenance or {}), **budget.describe()})
