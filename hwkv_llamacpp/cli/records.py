"""The records of a calibration as a table on the terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..calibration.run import Record


def print_records(records: Sequence[Record], selected: Record | None = None) -> None:
    """Prints the records as a table, the selected one marked. records: at least one."""
    table = Table(caption="KL in nats against full KV, and top-1 agreement, on held-out text")
    lengths = list(records[0].retention)
    for heading in (
        "n_sink",
        "asked",
        *(f"kept at {n:,}" for n in lengths),
        "full heads",
        "score",
        "KL",
        "top-1",
        "seconds",
        "",
    ):
        table.add_column(heading, justify="right")
    for r in records:
        windows = [w for row in r.policy.layers.values() for w in row]
        table.add_row(
            str(r.n_sink),
            r.label,
            *(f"{r.retention[n]:.3f}" for n in lengths),
            f"{windows.count(None)} / {len(windows)}",
            "-" if r.mean_score is None else f"{r.mean_score:.4f}",
            f"{r.distortion['kl']:.5f}",
            f"{r.distortion['top1']:.3f}",
            f"{r.seconds:.0f}",
            "selected" if r is selected else "",
        )
    # piped output keeps whole lines
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
