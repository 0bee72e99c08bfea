"""One row of windows for all layers, other rows for some."""

import argparse
from collections.abc import Mapping

from ..base.options import index
from ..base.shape import WindowRow
from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from .baseline import Baseline
from .rows import check_lengths, configurable, format_row, hand_made, row_option


class Pattern(Baseline):
    name = "pattern"
    help = "one row of windows for all layers, other rows for some"
    details = "A row has one window per KV head. Without --pattern, layers that no --layer names stay full."
    example = 'hwkv policy make pattern model.gguf --pattern "full,512,512,full" --layer 3:full,64,64,64 -o policy.json'

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--pattern",
            type=row_option,
            metavar="ROW",
            help='windows of the KV heads of every layer, as "full,512,512,full"',
        )
        parser.add_argument(
            "--layer",
            type=layer_row,
            action="append",
            default=[],
            metavar="L:ROW",
            help="windows of one layer; may be given again for others",
        )

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        if not args.pattern and not args.layer:
            raise HwkvError("a pattern needs --pattern or --layer")
        layers = dict(args.layer)
        if len(layers) != len(args.layer):
            raise HwkvError("--layer names a layer twice")
        return pattern(geometry, args.pattern, layers)


def pattern(
    geometry: ModelGeometry, row: WindowRow | None = None, by_layer: Mapping[int, WindowRow] | None = None
) -> Policy:
    """One row of windows repeated over all configurable layers, and other rows for single layers.

    Without a row, layers that by_layer does not name stay full. HwkvError if a row does not fit its layer.
    """
    by_layer = by_layer or {}
    rows = {layer.layer: row for layer in configurable(geometry)} if row else {}
    rows.update(by_layer)
    check_lengths(geometry, rows, "pattern")
    shown = {str(il): format_row(r) for il, r in sorted(by_layer.items())}
    return hand_made(
        geometry,
        rows,
        {"method": "pattern", **({"pattern": format_row(row)} if row else {}), **({"layers": shown} if shown else {})},
    )


def layer_row(text: str) -> tuple[int, list[int | None]]:
    """(layer, row) of "3:full,64,64,64", for argparse."""
    layer, colon, row = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not LAYER:ROW, as in 3:full,64,64,64")
    return index(layer), row_option(row)
