"""What commands print: tables, facts and JSON, on standard output."""

import json
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from ..base.names import clip, escaped, escaped_json

MAX_FACT = 400  # characters of what a file says in one line
MAX_ROWS = 512  # of a table, as many as a model has layers


def console():
    # piped output keeps whole lines: nothing is cut to a terminal's width
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def table(*columns):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        numeric = name in ("query heads", "KV heads", "K, V size", "cells", "MiB", "layer", "window")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def print_facts(facts):
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        line = f"{name:<{width}}  {escaped(clip(value, MAX_FACT))}"
        console().print(line, markup=False, soft_wrap=True)


def print_json(value):
    print(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def ends(items, n=MAX_ROWS):
    """(first items, number of those left out, last items) of a sequence; all of it first where it has no more than
    n."""
    if len(items) <= n:
        return items, 0, items[:0]
    return items[: n // 2], len(items) - n // 2 * 2, items[-(n // 2) :]


def window(window):
    return "full" if window is None else str(window)


def ranges(numbers):
    """0-4, 6: runs of consecutive numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def write_policy(args, policy):
    if args.output is None:
        sys.stdout.write(policy.to_json())
        return
    policy.save(args.output, overwrite=args.force)
    print(f"wrote {args.output}")
