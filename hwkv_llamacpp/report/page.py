"""`hwkv report`: Markdown, CSV and one self-contained HTML page from measured rows. Measures nothing."""

import html
import io
from dataclasses import asdict

from .comparison import make_sections, warnings

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


def print_medians(rows, view):
    """The tables of one run, on stdout."""
    for section in make_sections(rows):
        if section.view == view:
            for table in section.tables():
                table.print()


def markdown(sections):
    lines = ["# Measurements", "", *[f"> {text}\n" for text in warnings(sections)]]
    for section in sections:
        lines += [f"## {section.title}", "", *[f"- {what}: {text}" for what, text in section.about()], ""]
        lines += [table.markdown() for table in section.tables()]
    return "\n".join(lines).rstrip() + "\n"


def csv(rows):
    """One line per case. What is a list or a table in a row stays in the JSONL."""
    import pandas

    out = io.StringIO()
    frame = pandas.DataFrame(
        [
            {name: value for name, value in asdict(row).items() if name not in NOT_IN_CSV}
            | {f"set_{name}": value for name, value in row.settings.items()}
            for row in rows
        ]
    )
    frame.convert_dtypes().to_csv(out, index=False)  # whole numbers stay whole beside missing ones
    return out.getvalue()


def page(sections):
    parts = [f"<p class=warning>{html.escape(text)}</p>" for text in warnings(sections)]
    for section in sections:
        facts = "".join(f"<dt>{html.escape(what)}</dt><dd>{html.escape(text)}</dd>" for what, text in section.about())
        drawn = "".join(
            f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>" for title, svg in section.figures()
        )
        tables = "".join(f"<div class=wide>{table.html()}</div>" for table in section.tables())
        parts.append(f"<section><h2>{html.escape(section.title)}</h2><dl>{facts}</dl>{drawn}{tables}</section>")
    return PAGE.replace("%BODY%", "".join(parts))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hwkv-llamacpp measurements</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222b35; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; border-top: 2px solid #16324f; padding-top: .6rem; margin-top: 2.4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; }
dt { color: #66727f; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; text-align: center; }
figure svg { max-width: 100%; height: auto; }
figcaption { font-size: .8rem; color: #66727f; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0 .3rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .18rem .7rem; text-align: right; border-bottom: 1px solid #e3e7eb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { border-bottom: 1px solid #16324f; font-weight: 600; vertical-align: bottom; }
.note { font-size: .8rem; color: #66727f; margin: .2rem 0; }
.warning { background: #fdf0b8; padding: .5rem .8rem; }
@media print {
  body { margin: 0; max-width: none; font-size: 10pt; }
  figure, table { break-inside: avoid; }
  h2 { break-after: avoid; }
  .wide { overflow: visible; }
}
</style></head><body><h1>Measurements</h1>
<p class=note>Every case is a fresh llama-server and one request that fills its context. Medians over repetitions; ratios within
a repetition.</p>
%BODY%
</body></html>
"""
