"""`hwkv report`: Markdown, CSV and one self-contained HTML page from measured rows."""

import argparse
from pathlib import Path
from typing import Any

from ..base.atomic import check_target, replacing
from ..errors import HwkvError
from ..measure import records
from ..measure.rows import ServerRow
from ..report.comparison import make_sections
from ..report.page import csv, markdown, page
from .output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tables and figures from the rows of hwkv bench: report.md, report.csv and report.html in one folder."
    )
    parser.epilog = "example:\n  hwkv report run.jsonl -o report"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.jsonl", help="files of rows")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the files (default: print the Markdown)"
    )
    parser.add_argument(
        "--schema",
        action=_Schema,
        nargs=0,
        help="print the JSON schema of a row, of every kind of measurement, and end",
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")


class _Schema(argparse.Action):
    """Like --version: needs no other argument."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_json(records.schema())
        parser.exit()


def run(args: argparse.Namespace) -> None:
    rows: list[ServerRow] = []
    for path in args.runs:
        found = records.read(path)
        if other := next((row.kind for row in found if not isinstance(row, ServerRow)), None):
            raise HwkvError(f"{path}: rows of the kind '{other}' have no report: the rows of hwkv bench expected")
        rows += [row for row in found if isinstance(row, ServerRow)]
    rows = list({row.key: row for row in rows}.values())  # the last of each case
    if not rows:
        raise HwkvError(f"{', '.join(map(str, args.runs))}: no rows")
    sections = make_sections(rows)
    if args.output is None:
        print(markdown(sections), end="")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    texts = {"report.md": markdown(sections), "report.csv": csv(rows), "report.html": page(sections)}
    for name in texts:
        check_target(args.output / name, args.force)
    for name, text in texts.items():
        with replacing(args.output / name, args.force) as file:
            file.write(text.encode())
        print(f"wrote {args.output / name}")
