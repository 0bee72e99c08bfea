"""The windows and budgets that baselines are asked for on the command line."""

from bisect import bisect_left
from dataclasses import replace

from ..base import options, sizes
from ..errors import HwkvError
from ..policy.budget import Budget


def sink_flag(command, default):
    command.add_argument(
        "--sink",
        type=options.whole(0, "a number of tokens"),
        default=default,
        metavar="N",
        help="first tokens that every KV head keeps, too (default: %(default)s)",
    )


def window_flags(command):
    group = command.add_mutually_exclusive_group(required=True)
    group.add_argument("--window", type=options.tokens, metavar="N", help="tokens that every KV head keeps")
    budget_flags(command, group)


def budget_flags(command, group):
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


def asked_budget(args, geometry):
    if args.retention is None and args.budget_bytes is None:
        if args.ctx_size is not None:
            raise HwkvError("-c is the context of --retention or --budget-bytes; neither is given")
        return None
    geometry.warn_beyond(args.ctx_size or 0)
    return Budget(args.ctx_size or geometry.n_ctx_train, args.retention, args.budget_bytes)


def of_window(args, geometry, make):
    """make(window) for the --window, or for the largest within the budget."""
    budget = asked_budget(args, geometry)
    return make(args.window) if budget is None else largest(geometry, budget, make)


def largest(geometry, budget, make):
    """make(window) with the largest window that fits into the Budget. HwkvError if not even a window of 1 token
    does."""
    window = bisect_left(range(1, budget.n_ctx + 1), True, key=lambda w: not budget.holds(geometry, make(w)))
    if not window:
        raise HwkvError(f"no window fits: 1 token per KV head is {budget.shows(geometry, make(1))}")
    policy = make(window)
    return replace(policy, provenance={**policy.provenance, **budget.describe()})
