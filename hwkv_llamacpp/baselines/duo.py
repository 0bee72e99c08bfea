"""DuoAttention's form: every KV head is full or streaming."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..base import options
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.allocation import allocate
from ..policy.budget import Budget
from ..policy.policy import Policy
from .baseline import Baseline
from .budgets import asked_budget, budget_flags, sink_flag
from .rows import hand_made


class Duo(Baseline):
    name = "duo"
    help = "DuoAttention's form: every KV head is full or streaming"
    details = (
        "The form of Xiao et al. 2024 (arXiv 2410.10819). Full are the heads that lose most with the window, as a run"
        " of hwkv calibrate --method leastkl measured it."
    )
    example = (
        "hwkv policy make duo model.gguf --run policy.calib --window 252 --sink 4 --retention 0.5 -c 8192 -o duo.json"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--run",
            dest="folder",
            type=Path,
            required=True,
            metavar="DIR",
            help="run folder of hwkv calibrate --method leastkl",
        )
        parser.add_argument(
            "--window",
            type=options.tokens,
            required=True,
            metavar="N",
            help="window of the other heads, a candidate of the run",
        )
        budget_flags(parser, parser.add_mutually_exclusive_group(required=True))
        sink_flag(parser, 4)

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        from ..calibration.methods.leastkl import expected_losses  # slow to import, and needed here alone

        windows, losses = expected_losses(args.folder, geometry, args.sink)
        if args.window not in windows:
            candidates = ", ".join(map(str, windows))
            raise HwkvError(f"--window is {args.window}; the run in {args.folder} has the candidates {candidates}")
        at = windows.index(args.window)
        of_window = {il: rows[:, at] for il, rows in losses.items()}
        budget = asked_budget(args, geometry)
        assert budget is not None  # argparse requires one of its options
        return duo(geometry, of_window, args.window, budget, args.sink)


def duo(
    geometry: ModelGeometry, losses: Mapping[int, Iterable[float]], window: int, budget: Budget, n_sink: int = 4
) -> Policy:
    """DuoAttention's form (Xiao et al. 2024, arXiv 2410.10819).

    Every KV head is full, or keeps the first n_sink tokens and a window. losses: {layer: [n_head_kv]} of all
    configurable layers: what each head would lose with the window. The heads that lose most for the cells that they
    save are full, as many as the Budget holds. HwkvError if not even the windows fit.
    """
    policy = allocate(geometry, [window], {il: [[x] for x in row] for il, row in losses.items()}, n_sink, budget)
    return hand_made(geometry, policy.layers, {"method": "duo", "window": window, **budget.describe()}, n_sink)
