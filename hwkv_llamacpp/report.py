"""`hwkv report`: Markdown, CSV and one self-contained HTML page from measured rows. Measures nothing.

Rows are compared only where machine, builds, model and settings are the same; each such set is a section of its own. A figure of a context is
the median over repetitions; a ratio is the median over repetitions of the ratios within one.
"""

import html
import io
import statistics
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from . import figures, records
from .atomic import check_target, replacing
from .errors import HwkvError
from .policy import Policy

MIB = 2**20
TOLERANCE = 0.03  # of the predicted peak
NOT_IN_CSV = ("samples", "kv_layers", "log_tail", "machine", "settings", "arguments", "build_flags", "predicted_parts", "breakdown")


def add_arguments(parser):
    parser.description = "Tables and figures from the rows of hwkv bench: report.md, report.csv and report.html in one folder."
    parser.epilog = "example:\n  hwkv report run.jsonl -o report"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.jsonl", help="files of rows")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder for the files (default: print the Markdown)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def run(args):
    rows = [row for path in args.runs for row in records.read(path)]
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


def print_medians(rows):
    """The tables of one run, on stdout."""
    for section in make_sections(rows):
        for table in section.tables():
            table.print()


# rows -> sections -> tables

@dataclass
class Table:
    title: str
    columns: list
    rows: list = field(default_factory=list)  # of texts
    notes: list = field(default_factory=list)

    def markdown(self):
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |",
                 "|" + "|".join(" :-- " if i == 0 else " --: " for i in range(len(self.columns))) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines + [""] + [f"{note}\n" for note in self.notes])

    def html(self):
        def cells(tag, row):
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{cells('th', self.columns)}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def print(self):
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console = Console(highlight=False, **({} if sys.stdout.isatty() else {"width": 200}))
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)


@dataclass
class Section:
    """Rows that may stand in one ratio: same kind, machine, builds, model, settings and limit."""

    rows: list

    @property
    def kind(self):
        return self.rows[0].kind

    @cached_property
    def arms(self):
        """Names of the arms, upstream and full first."""
        names = dict.fromkeys(row.arm for row in self.rows)
        return sorted(names, key=lambda name: {"upstream": 0, "full": 1}.get(name, 2))

    @property
    def title(self):
        row = self.rows[0]
        return f"{ {'memory': 'Memory', 'throughput': 'Throughput', 'capacity': 'Capacity'}[row.kind] }: {row.model}"

    def about(self):
        """[(what, text)] that all rows share."""
        row = self.rows[0]
        gpus = ", ".join(gpu["name"] for gpu in row.machine.get("gpus", ()))
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items() if value is not None)
        commits = sorted({row.commit or "unknown" for row in self.rows})
        facts = [("machine", f"{row.machine['cpu']}, {row.machine['n_cpus']} CPUs, {row.machine['memory_bytes'] / 2**30:.1f} GiB, {row.machine['system']}"
                  + (f", {gpus}, driver {row.machine.get('driver')}" if gpus else "")),
                 ("build", f"{row.build}, commit {', '.join(commits)}, llama.cpp {row.upstream_commit}, builds {row.build_pair}"),
                 ("model", f"{row.model}, {row.model_bytes / MIB:,.1f} MiB, sha256 {row.model_sha256[:16]}, trained for {row.n_ctx_train:,} tokens"),
                 ("settings", settings)]
        if row.memory_limit_bytes:
            kinds = sorted({r.memory_limit_kind for r in self.rows if r.memory_limit_kind})
            facts.append(("memory limit", f"{row.memory_limit_bytes / MIB:,.0f} MiB ({', '.join(kinds)})"))
        for name in self.arms:
            policy = next(r for r in self.rows if r.arm == name)
            if policy.policy_fingerprint:
                kept = {r.n_ctx: r.retention for r in self.rows if r.arm == name and (self.kind != "capacity" or r.step == "last success")}
                kept = ", ".join(f"{kept[n]:.1%} at {n:,}" for n in sorted(kept)) or "not known"
                facts.append((f"policy {name}", f"{policy.policy_fingerprint}, nominal retention {kept}"))
        return facts

    def policies(self):
        """{arm: Policy} of the arms that have one."""
        found = {}
        for row in self.rows:
            if row.policy_fingerprint and row.arm not in found:
                found[row.arm] = Policy({il: tuple(windows) for il, _, windows in row.kv_layers})
        return found

    def of(self, arm, n_ctx):
        return [row for row in self.rows if row.arm == arm and row.n_ctx == n_ctx]

    def ok(self, arm, n_ctx):
        return [row for row in self.of(arm, n_ctx) if row.status == "ok"]

    @cached_property
    def contexts(self):
        return sorted({row.n_ctx for row in self.rows})

    @property
    def reference(self):
        return next((arm for arm in self.arms if arm in ("upstream", "full")), None)

    def median(self, arm, n_ctx, name):
        values = [getattr(row, name) for row in self.ok(arm, n_ctx) if getattr(row, name) is not None]
        return statistics.median(values) if values else None

    def ratio(self, arm, n_ctx, name):
        """Median over repetitions of this arm's value as a share of the reference's in the same repetition; None without a pair. Figures of
        different instruments have no ratio."""
        base = {row.round: row for row in self.ok(self.reference, n_ctx)} if self.reference else {}
        pairs = [(row, base[row.round]) for row in self.ok(arm, n_ctx) if row.round in base]
        ratios = [getattr(a, name) / getattr(b, name) for a, b in pairs
                  if getattr(a, name) and getattr(b, name) and (name != "peak_bytes" or a.peak_counts == b.peak_counts)]
        return statistics.median(ratios) if ratios else None

    def tables(self):
        return {"memory": self._memory, "throughput": self._throughput, "capacity": self._capacity}[self.kind]()

    def _memory(self):
        counts = sorted({row.peak_counts for row in self.rows if row.peak_counts})
        table = Table(f"Peak memory in MiB ({'; '.join(counts)})",
                      ["context, arm", "peak", "all repetitions", f"of {self.reference}" if self.reference else "", "KV allocated", "KV predicted",
                       "peak predicted", "off by"])
        worst, n, wrong_kv = 0, 0, 0
        for n_ctx, arm in ((n_ctx, arm) for n_ctx in self.contexts for arm in self.arms):
            rows = self.ok(arm, n_ctx)
            if not self.of(arm, n_ctx):
                continue
            for row in rows:
                n += 1
                wrong_kv += not same_kv(row)
                if row.predicted_peak_bytes and row.peak_bytes:
                    worst = max(worst, abs(row.predicted_peak_bytes / row.peak_bytes - 1))
            peak, predicted = self.median(arm, n_ctx, "peak_bytes"), self.median(arm, n_ctx, "predicted_peak_bytes")
            table.rows.append([f"{n_ctx:,}, {arm}", mib(peak), ", ".join(mib(row.peak_bytes) for row in rows) or failures(self.of(arm, n_ctx)),
                               share(self.ratio(arm, n_ctx, "peak_bytes")), mib(self.median(arm, n_ctx, "kv_bytes")),
                               mib(self.median(arm, n_ctx, "predicted_kv_bytes")), mib(predicted),
                               f"{predicted / peak - 1:+.1%}" if predicted and peak else "-"])
        table.notes.append(f"Predicted KV bytes are the allocated ones in {n - wrong_kv} of {n} cases."
                           + (f" The predicted peak is at most {worst:.1%} off the measured one." if worst else ""))
        return [table]

    def _throughput(self):
        tables = []
        for name, what in (("prefill_ts", "Prefill"), ("decode_ts", "Decode")):
            table = Table(f"{what} in tokens per second", ["context, arm", "median", "all repetitions", f"of {self.reference}" if self.reference else "", "tokens"])
            tokens = {"prefill_ts": "n_prefill", "decode_ts": "n_decode"}[name]
            for n_ctx, arm in ((n_ctx, arm) for n_ctx in self.contexts for arm in self.arms):
                rows = self.ok(arm, n_ctx)
                if self.of(arm, n_ctx):
                    table.rows.append([f"{n_ctx:,}, {arm}", number(self.median(arm, n_ctx, name)),
                                       ", ".join(number(getattr(row, name)) for row in rows) or failures(self.of(arm, n_ctx)),
                                       share(self.ratio(arm, n_ctx, name)), f"{getattr(rows[0], tokens):,}" if rows else "-"])
            tables.append(table)
        return tables

    def _capacity(self):
        table = Table("Largest context", ["arm", "last success", "first failure", "confirmed", "failure",
                                          f"gain over {self.reference}", "ideal, all bytes", "ideal, KV alone", "share of the ideals"])
        found = {arm: Pair(self, arm) for arm in self.arms}
        base = found.get(self.reference)
        for arm, pair in found.items():
            gain = pair.last_success / base.last_success if base and pair.last_success and base.last_success else None
            ideals = [ideal(base, pair), ideal_kv(base, pair)] if gain and pair is not base else [None, None]
            table.rows.append([arm, tokens(pair.last_success), tokens(pair.first_failure), pair.confirmed, pair.cause,
                               f"{gain:.3f}" if gain and pair is not base else "-", *[f"{x:.3f}" if x else "-" for x in ideals],
                               ", ".join(f"{gain / x:.1%}" for x in ideals if x) or "-"])
        table.notes.append("A boundary is a pair that was measured: contexts one grid step apart, each repeated three times in filled contexts. The ideal with "
                           "all bytes is the context at which the predicted peak reaches the reference's; that of KV alone counts the nominal windows "
                           "and nothing else.")
        for arm, pair in found.items():
            if pair.others:
                table.notes.append(f"{arm}: {pair.others}")
        return [table]

    def figures(self):
        """[(title, SVG)]"""
        drawn = []
        if self.kind == "memory":
            drawn.append(("Peak memory against the context", figures.memory(self)))
        elif self.kind == "throughput":
            drawn.append(("Speed as a share of the reference's", figures.throughput(self)))
        elif self.kind == "capacity":
            drawn.append(("Largest context", figures.capacity({arm: Pair(self, arm) for arm in self.arms})))
        drawn += [(f"Windows of {arm}", figures.policy(policy)) for arm, policy in self.policies().items()]
        return [(title, svg) for title, svg in drawn if svg]


class Pair:
    """The measured boundary of one arm."""

    def __init__(self, section, arm):
        self.arm = arm
        self.rows = [row for row in section.rows if row.arm == arm]
        good = [row for row in self.rows if row.step == "last success"]
        bad = [row for row in self.rows if row.step == "first failure"]
        self.last_success = good[0].n_ctx if good else max((row.n_ctx for row in self.rows if row.status == "ok"), default=None)
        self.first_failure = bad[0].n_ctx if bad else min((row.n_ctx for row in self.rows if row.status == "out of memory"), default=None)
        n_good, n_bad = sum(row.status == "ok" for row in good), sum(row.status == "out of memory" for row in bad)
        self.is_confirmed = n_good == n_bad == 3
        self.confirmed = f"{n_good} of 3, {n_bad} of 3" + ("" if self.is_confirmed else ": NO")
        failure = next((row for row in bad if row.status == "out of memory"), None)
        self.cause = f"{failure.phase}: {failure.cause}" if failure else "-"
        other = [row for row in self.rows if row.status not in ("ok", "out of memory")]
        self.others = f"{len(other)} runs ended otherwise and count for nothing, the first at {other[0].n_ctx:,}: {other[0].cause}" if other else ""


def ideal(base, pair):
    """Gain at which the arm's predicted peak is that of the reference at its boundary; predictions between measured contexts are linear."""
    target = next((row.predicted_peak_bytes for row in base.rows if row.n_ctx == base.last_success and row.predicted_peak_bytes), None)
    points = sorted({(row.n_ctx, row.predicted_peak_bytes) for row in pair.rows if row.predicted_peak_bytes})
    if target is None or len(points) < 2:
        return None
    above = next((i for i, (_, n_bytes) in enumerate(points) if n_bytes >= target), len(points) - 1)
    (n0, b0), (n1, b1) = points[max(above - 1, 0)], points[max(above, 1)]
    return (n0 + (target - b0) * (n1 - n0) / (b1 - b0)) / base.last_success if b1 > b0 else None


def ideal_kv(base, pair):
    """Gain at which the nominal KV bytes of the policy are those of the reference at its boundary."""
    def n_bytes(row, n):
        return sum(size * min(n, window or n) for _, size, windows in row.kv_layers for window in windows)

    target = n_bytes(base.rows[0], base.last_success)
    low, high = 1, 2**26
    if n_bytes(pair.rows[0], high) <= target:
        return None  # every head has a window: no context is too long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if n_bytes(pair.rows[0], middle) <= target else (low, middle)
    return low / base.last_success


def make_sections(rows):
    """Sections in the order memory, throughput, capacity; rows of a run's preparation are left out."""
    sets = {}
    for row in rows:
        if row.step != "process":
            key = (row.kind, str(row.machine), row.build_pair, row.model_sha256, str(row.settings), row.memory_limit_bytes)
            sets.setdefault(key, []).append(row)
    order = {"memory": 0, "throughput": 1, "capacity": 2}
    for kind in {key[0] for key in sets} - set(order):
        raise HwkvError(f"rows of the unknown kind {kind!r}")
    return [Section(sets[key]) for key in sorted(sets, key=lambda key: order[key[0]])]


def warnings(sections):
    """What the reader must know of rows that cannot be compared."""
    machines, builds = {str(s.rows[0].machine) for s in sections}, {s.rows[0].build_pair for s in sections}
    found = []
    if len(machines) > 1:
        found.append(f"These rows come from {len(machines)} machines. Each has sections of its own, and no ratio mixes them.")
    if len(builds) > 1:
        found.append(f"These rows come from {len(builds)} sets of builds. Each has sections of its own, and no ratio mixes them.")
    return found


def same_kv(row):
    """True if the allocated KV bytes are the predicted ones: to the byte where the runtime told bytes, else to what its log shows."""
    if row.kv_bytes is None or row.predicted_kv_bytes is None:
        return False
    return abs(row.kv_bytes - row.predicted_kv_bytes) <= (0 if row.kv_bytes_source == "props" else 0.006 * MIB)


# output

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
    frame = pandas.DataFrame([{**{k: v for k, v in asdict(row).items() if k not in NOT_IN_CSV}, **{f"set_{k}": v for k, v in row.settings.items()}}
                              for row in rows])
    frame.convert_dtypes().to_csv(out, index=False)  # whole numbers stay whole beside missing ones
    return out.getvalue()


def page(sections):
    parts = [f"<p class=warning>{html.escape(text)}</p>" for text in warnings(sections)]
    for section in sections:
        facts = "".join(f"<dt>{html.escape(what)}</dt><dd>{html.escape(text)}</dd>" for what, text in section.about())
        drawn = "".join(f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>" for title, svg in section.figures())
        tables = "".join(f"<div class=wide>{table.html()}</div>" for table in section.tables())
        parts.append(f"<section><h2>{html.escape(section.title)}</h2><dl>{facts}</dl>{drawn}{tables}</section>")
    return PAGE.replace("%BODY%", "".join(parts))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hwkv-llamacpp measurements</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222b35; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; } h2 { font-size: 1.15rem; border-top: 2px solid #16324f; padding-top: .6rem; margin-top: 2.4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; } dt { color: #66727f; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; text-align: center; } figure svg { max-width: 100%; height: auto; } figcaption { font-size: .8rem; color: #66727f; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0 .3rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; } th, td { padding: .18rem .7rem; text-align: right; border-bottom: 1px solid #e3e7eb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { border-bottom: 1px solid #16324f; font-weight: 600; vertical-align: bottom; }
.note { font-size: .8rem; color: #66727f; margin: .2rem 0; } .warning { background: #fdf0b8; padding: .5rem .8rem; }
@media print { body { margin: 0; max-width: none; font-size: 10pt; } figure, table { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; } }
</style></head><body><h1>Measurements</h1>
<p class=note>Every case is a fresh llama-server and one request that fills its context. Medians over repetitions; ratios within a repetition.</p>
%BODY%
</body></html>
"""


def mib(n_bytes):
    return "-" if n_bytes is None else f"{n_bytes / MIB:,.1f}"


def number(value):
    return "-" if value is None else f"{value:,.1f}"


def share(ratio):
    return "-" if ratio is None else f"{ratio:.3f}"


def tokens(n):
    return "-" if n is None else f"{n:,}"


def failures(rows):
    return "; ".join(dict.fromkeys(f"{row.status} in {row.phase}" for row in rows))
