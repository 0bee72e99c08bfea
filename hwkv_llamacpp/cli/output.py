"""What commands print: tables, facts and JSON, on standard output."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from ..base.names import clip, escaped, escaped_json
from ..policy.policy import Policy

MAX_FACT = 400  # characters of what a file says in one line
MAX_ROWS = 512  # of a table, as many as a model has layers

T = TypeVar("T")


def console() -> Console:
    # piped output keeps whole lines: nothing is cut to a terminal's width
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        numeric = name in ("query heads", "KV heads", "K, V size", "cells", "MiB", "layer", "window")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        line = f"{name:<{width}}  {escaped(clip(value, MAX_FACT))}"
        console().print(line, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def ends(items: Sequence[T], n: int = MAX_ROWS) -> tuple[Sequence[T], int, Sequence[T]]:
    """(first items, number of those left out, last items) of a sequence; all of it first where it has no more than
    n."""
    if len(items) <= n:
        return items, 0, items[:0]
    return items[: n // 2], len(items) - n // 2 * 2, items[-(n // 2) :]


def window(window: int | None) -> str:
    return "full" if window is None else str(window)


def ranges(numbers: Iterable[int]) -> str:
    """0-4, 6: runs of consecutive numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def write_policy(args: argparse.Namespace, policy: Policy) -> None:
    if args.output is None:
        sys.stdout.write(policy.to_json())
        return
    policy.save(args.output, overwrite=args.force)
    print(f"wrote {args.output}")
