"""DuoAttention's form: every KV head is full or streaming."""

from pathlib import Path

from ..base import options
from ..errors import HwkvError
from ..policy.allocation import allocate
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
    def add_arguments(cls, parser):
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
    def make(cls, geometry, args):
        from ..calibration.methods.leastkl import expected_losses  # slow to import, and needed here alone

        windows, losses = expected_losses(args.folder, geometry, args.sink)
        if args.window not in windows:
            candidates = ", ".join(map(str, windows))
            raise HwkvError(f"--window is {args.window}; the run in {args.folder} has the candidates {candidates}")
        at = windows.index(args.window)
        losses = {il: rows[:, at] for il, rows in losses.items()}
        return duo(geometry, losses, args.window, asked_budget(args, geometry), args.sink)


def duo(geometry, losses, window, budget, n_sink=4):
    """DuoAttention's form (Xiao et al. 2024, arXiv 2410.10819): every KV head is full, or keeps the first n_sink tokens
    and a window.

    losses: {layer: [n_head_kv]} of all configurable layers, what each head would lose; those that lose most per cell
    are full, as many as the Budget holds. HwkvError if not even the windows fit.
    """
    policy = allocate(geometry, [window], {il: [[x] for x in row] for il, row in losses.items()}, n_sink, budget)
    return hand_made(geometry, policy.layers, {"method": "duo", "window": window, **budget.describe()}, n_sink)
