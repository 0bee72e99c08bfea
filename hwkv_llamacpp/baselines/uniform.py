"""The same window for every KV head."""

import argparse
from collections.abc import Sequence

from ..base.options import index
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from .baseline import Baseline
from .budgets import of_window, sink_flag, window_flags
from .rows import configurable, hand_made, why_not


class Uniform(Baseline):
    name = "uniform"
    help = "the same window for every KV head"
    details = "A window counts the token itself."
    example = (
        "hwkv policy make uniform model.gguf --window 512 --keep-full 0,1,17:2 -o policy.json\n"
        "  hwkv policy make uniform model.gguf --retention 0.5 -c 8192 -o policy.json"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        window_flags(parser)
        sink_flag(parser, 0)
        parser.add_argument(
            "--keep-full",
            type=heads,
            default=[],
            metavar="L[:H],...",
            help="KV heads (layer:head) or whole layers that stay full",
        )

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        return of_window(args, geometry, lambda window: uniform(geometry, window, args.keep_full, args.sink))


def uniform(
    geometry: ModelGeometry, window: int, keep_full: Sequence[tuple[int, int | None]] = (), n_sink: int = 0
) -> Policy:
    """One window for every KV head.

    keep_full: (layer, KV head) pairs that stay full; head None is the whole layer. HwkvError if the model has no such
    head.
    """
    rows: dict[int, list[int | None]] = {layer.layer: [window] * layer.n_head_kv for layer in configurable(geometry)}
    for il, head in keep_full:
        if il not in rows:
            raise HwkvError(f"layer {il} cannot be kept full: {why_not(geometry, il)}")
        if head is not None and head >= len(rows[il]):
            raise HwkvError(
                f"KV head {head} of layer {il} cannot be kept full: the layer has KV heads 0 to {len(rows[il]) - 1}"
            )
        for i in range(len(rows[il])) if head is None else (head,):
            rows[il][i] = None
    kept = [f"{il}" if head is None else f"{il}:{head}" for il, head in keep_full]
    return hand_made(
        geometry, rows, {"method": "uniform", "window": window, **({"keep_full": kept} if kept else {})}, n_sink
    )


def heads(text: str) -> list[tuple[int, int | None]]:
    """(layer, KV head) pairs of "0,1,17:2", for argparse. Head None is the whole layer."""
    pairs = []
    for item in text.split(","):
        layer, colon, head = item.partition(":")
        pairs.append((index(layer), index(head) if colon else None))
    return pairs
