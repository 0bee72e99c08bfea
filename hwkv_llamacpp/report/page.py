"""`hwkv report`: Markdown, CSV and one self-contained HTML page from measured rows. Measures nothing."""

import io
from collections.abc import Sequence

from ..measure.rows import ServerRow
from .comparison import Section, make_sections, warnings

NOT_IN_CSV = (
    "samples",
    "kv_layers",
    "log_tail",
    "machine",
    "settings",
    "arguments",
    "build_flags",
    "predicted_parts",
    "breakdown",
)


def print_medians(rows: Sequence[ServerRow], view: str) -> None:
    """The tables of one run, on stdout."""
    for section in make_sections(rows):
        if section.view == view:
            for table in section.tables():
                table.print()


def markdown(sections: Sequence[Section]) -> str:
    lines = ["# Measurements", "", *[f"> {text}\n" for text in warnings(sections)]]
    for section in sections:
        lines += [f"## {section.title}", "", *[f"- {what}: {text}" for what, text in section.about()], ""]
        lines += [table.markdown() for table in section.tables()]
    return "\n".join(lines).rstrip() + "\n"


def csv(rows: Sequence[ServerRow]) -> str:
    """One line per case. What is a list or a table in a row stays in the JSONL."""
    import pandas

    out = io.StringIO()
    frame = pandas.DataFrame(
        [
            {name: value for name, value in row.model_dump().items() if name not in NOT_IN_CSV}
            | {f"set_{name}": value for name, value in (row.settings or {}).items()}
            for row in rows
        ]
    )
    frame.convert_dtypes().to_csv(out, index=False)  # whole numbers stay whole beside missing ones
    return out.getvalue()


def page(sections: Sequence[Section]) -> str:
    # imported here: the other commands need no templates
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("page.html").render(sections=sections, warnings=warnings(sections))
