"""What rows say when they are held against each other: sections of comparable rows, medians, ratios, boundaries.

Rows are compared only where machine, builds, model and settings are the same; each such set is a section of its own. A
figure of a context is the median over repetitions; a ratio is the median over repetitions of the ratios within one.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..base import sizes
from ..errors import HwkvError
from ..measure.rows import ServerRow
from ..plot import figures
from ..policy.policy import Policy

MIB = 2**20
NEEDED = (
    "build_pair",
    "kv_layers",
    "machine",
    "model",
    "model_bytes",
    "model_sha256",
    "n_ctx_train",
    "settings",
)  # in every row
# what is compared
FIGURES = ("peak_bytes", "predicted_peak_bytes", "kv_bytes", "predicted_kv_bytes", "prefill_ts", "decode_ts")
VIEWS = {"memory": "Memory", "throughput": "Throughput", "capacity": "Capacity"}


@dataclass
class Table:
    title: str
    columns: list
    rows: list = field(default_factory=list)  # of texts
    notes: list = field(default_factory=list)

    def markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join(" :-- " if i == 0 else " --: " for i in range(len(self.columns))) + "|",
        ]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines + [""] + [f"{note}\n" for note in self.notes])

    def print(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=escape(self.title), box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(self.columns):
            table.add_column(escape(name), justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*map(escape, row))  # a file's name may hold brackets
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)


@dataclass
class Section:
    """Rows that may stand in one ratio: same kind, machine, builds, model, settings and limit. view: which of their
    figures."""

    rows: list
    view: str

    @cached_property
    def arms(self) -> list[str]:
        """Names of the arms, upstream and full first."""
        names = dict.fromkeys(row.arm for row in self.rows)
        return sorted(names, key=lambda name: {"upstream": 0, "full": 1}.get(name, 2))

    @property
    def title(self) -> str:
        row = self.rows[0]
        return f"{VIEWS[self.view]}: {row.model}"

    def about(self) -> list[tuple[str, str]]:
        """[(what, text)] that all rows share."""
        row = self.rows[0]
        gpus = ", ".join(gpu["name"] for gpu in row.machine.get("gpus", ()))
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items() if value is not None)
        commits = sorted({row.commit or "unknown" for row in self.rows})
        machine = row.machine
        facts = [
            (
                "machine",
                f"{machine['cpu']}, {machine['n_cpus']} CPUs, {machine['memory_bytes'] / 2**30:.1f} GiB,"
                + f" {machine['system']}"
                + (f", {gpus}, driver {machine.get('driver')}" if gpus else ""),
            ),
            (
                "build",
                f"{row.build}, commit {', '.join(commits)}, llama.cpp {row.upstream_commit}, builds {row.build_pair}",
            ),
            (
                "model",
                f"{row.model}, {row.model_bytes / MIB:,.1f} MiB, sha256 {row.model_sha256[:16]}, trained for "
                f"{row.n_ctx_train:,} tokens",
            ),
            ("settings", settings),
        ]
        if row.memory_limit_bytes:
            kinds = sorted({r.memory_limit_kind for r in self.rows if r.memory_limit_kind})
            facts.append(("memory limit", f"{sizes.show(row.memory_limit_bytes)} ({', '.join(kinds)})"))
        for name in self.arms:
            policy = next(r for r in self.rows if r.arm == name)
            if policy.policy_fingerprint:
                kept = {
                    r.n_ctx: r.retention
                    for r in self.rows
                    if r.arm == name and (self.view != "capacity" or r.step == "last success")
                }
                shares = ", ".join(f"{kept[n]:.1%} of the cells at {n:,} tokens" for n in sorted(kept))
                facts.append(
                    (
                        f"policy {name}",
                        f"{policy.policy_fingerprint}, "
                        + (f"keeps {shares}" if shares else "no boundary was measured"),
                    )
                )
        return facts

    def policies(self) -> dict[str, Policy]:
        """{arm: Policy} of the arms that have one."""
        found = {}
        for row in self.rows:
            if row.policy_fingerprint and row.arm not in found:
                found[row.arm] = Policy({il: tuple(windows) for il, _, windows in row.kv_layers}, row.n_sink)
        return found

    def of(self, arm: str, n_ctx: int) -> list[ServerRow]:
        return [row for row in self.rows if row.arm == arm and row.n_ctx == n_ctx]

    def ok(self, arm: str, n_ctx: int) -> list[ServerRow]:
        return [row for row in self.of(arm, n_ctx) if row.status == "ok"]

    @cached_property
    def contexts(self) -> list[int]:
        return sorted({row.n_ctx for row in self.rows})

    @property
    def reference(self) -> str | None:
        return next((arm for arm in self.arms if arm in ("upstream", "full")), None)

    @cached_property
    def _frame(self):
        """The figures of the rows that succeeded."""
        import pandas  # here: the other commands do without

        names = ["arm", "n_ctx", "round", "peak_counts", *FIGURES]
        rows = [[getattr(row, name) for name in names] for row in self.rows if row.status == "ok"]
        return pandas.DataFrame(rows, columns=names).astype(dict.fromkeys(FIGURES, float))

    @cached_property
    def _medians(self):
        return self._frame.groupby(["arm", "n_ctx"])[list(FIGURES)].median()

    @cached_property
    def _ratios(self):
        """Medians of the ratios within a repetition."""
        frame = self._frame
        reference = (
            frame[frame.arm == self.reference].drop(columns="arm").drop_duplicates(["n_ctx", "round"], keep="last")
        )
        pairs = frame.merge(reference, on=["n_ctx", "round"], suffixes=("", " of the reference"))
        for name in FIGURES:
            values, base = pairs[name], pairs[f"{name} of the reference"]
            pairs[name] = (values / base).where((values != 0) & (base != 0))
        # figures of different instruments have no ratio
        pairs.loc[pairs.peak_counts != pairs["peak_counts of the reference"], "peak_bytes"] = None
        return pairs.groupby(["arm", "n_ctx"])[list(FIGURES)].median()

    def median(self, arm: str, n_ctx: int, name: str) -> float | None:
        """Over repetitions; None without any."""
        return _at(self._medians, arm, n_ctx, name)

    def ratio(self, arm: str, n_ctx: int, name: str) -> float | None:
        """Median over repetitions of this arm's value as a share of the reference's in the same repetition; None
        without a pair."""
        return _at(self._ratios, arm, n_ctx, name)

    @property
    def _of_reference(self) -> str:
        return f"of {self.reference}" if self.reference else ""

    def tables(self) -> list[Table]:
        return {"memory": self._memory, "throughput": self._throughput, "capacity": self._capacity}[self.view]()

    def _memory(self) -> list[Table]:
        counts = sorted({row.peak_counts for row in self.rows if row.peak_counts})
        table = Table(
            f"Peak memory in MiB ({'; '.join(counts)})",
            [
                "context, arm",
                "peak",
                "all repetitions",
                self._of_reference,
                "KV allocated",
                "KV predicted",
                "peak predicted",
                "off by",
            ],
        )
        worst, ran = 0.0, []
        for n_ctx, arm in ((n_ctx, arm) for n_ctx in self.contexts for arm in self.arms):
            rows = self.ok(arm, n_ctx)
            if not self.of(arm, n_ctx):
                continue
            ran += rows
            for row in rows:
                if row.predicted_peak_bytes and row.peak_bytes:
                    worst = max(worst, abs(row.predicted_peak_bytes / row.peak_bytes - 1))
            peak, predicted = self.median(arm, n_ctx, "peak_bytes"), self.median(arm, n_ctx, "predicted_peak_bytes")
            table.rows.append(
                [
                    f"{n_ctx:,}, {arm}",
                    mib(peak),
                    ", ".join(mib(row.peak_bytes) for row in rows) or failures(self.of(arm, n_ctx)),
                    share(self.ratio(arm, n_ctx, "peak_bytes")),
                    mib(self.median(arm, n_ctx, "kv_bytes")),
                    mib(self.median(arm, n_ctx, "predicted_kv_bytes")),
                    mib(predicted),
                    f"{predicted / peak - 1:+.1%}" if predicted and peak else "-",
                ]
            )
        table.notes.append(
            kv_note(ran) + (f" The predicted peak is at most {worst:.1%} off the measured one." if worst else "")
        )
        return [table]

    def _throughput(self) -> list[Table]:
        tables = []
        for name, what in (("prefill_ts", "Prefill"), ("decode_ts", "Decode")):
            table = Table(
                f"{what} in tokens per second",
                ["context, arm", "median", "all repetitions", self._of_reference, "tokens"],
            )
            tokens = {"prefill_ts": "n_prefill", "decode_ts": "n_decode"}[name]
            for n_ctx, arm in ((n_ctx, arm) for n_ctx in self.contexts for arm in self.arms):
                rows = self.ok(arm, n_ctx)
                if self.of(arm, n_ctx):
                    table.rows.append(
                        [
                            f"{n_ctx:,}, {arm}",
                            number(self.median(arm, n_ctx, name)),
                            ", ".join(number(getattr(row, name)) for row in rows) or failures(self.of(arm, n_ctx)),
                            share(self.ratio(arm, n_ctx, name)),
                            f"{getattr(rows[0], tokens):,}" if rows else "-",
                        ]
                    )
            tables.append(table)
        return tables

    def _capacity(self):
        table = Table(
            "Largest context",
            [
                "arm",
                "last success",
                "first failure",
                "confirmed",
                "failure",
                "charged, MiB",
                f"gain over {self.reference or 'upstream'}",
                "ideal, all bytes",
                "ideal, KV alone",
                "share of the ideals",
            ],
        )
        found = {arm: Pair(self, arm) for arm in self.arms}
        base = found[self.reference] if self.reference else None
        for arm, pair in found.items():
            gain = pair.last_success / base.last_success if base and pair.last_success and base.last_success else None
            ideals = [ideal(base, pair), ideal_kv(base, pair)] if gain and base and pair is not base else [None, None]
            table.rows.append(
                [
                    arm,
                    tokens(pair.last_success),
                    tokens(pair.first_failure),
                    pair.confirmed,
                    pair.cause,
                    mib(pair.charged),
                    f"{gain:.3f}" if gain and pair is not base else "-",
                    *[f"{x:.3f}" if x else "-" for x in ideals],
                    ", ".join(f"{gain / x:.1%}" for x in ideals if gain and x) or "-",
                ]
            )
        table.notes.append(
            "A boundary is a pair that was measured: contexts one grid step apart, each repeated three times in filled "
            "contexts. The ideal with all bytes is the context at which the predicted peak reaches the reference's; "
            "that of KV alone counts the nominal windows and nothing else."
        )
        if any(pair.charged for pair in found.values()):
            table.notes.append(
                "Charged is the most that the kernel counted against the limit at the last success; that includes the "
                "page cache of files that the server read."
            )
        table.notes.append(kv_note([row for row in self.rows if row.kv_bytes]))
        off = [
            f"{arm} {pair.at_boundary.predicted_peak_bytes / pair.at_boundary.peak_bytes - 1:+.1%}"
            for arm, pair in found.items()
            if pair.at_boundary
        ]
        if off:
            table.notes.append(f"The predicted peak at the last success is off the measured one by: {', '.join(off)}.")
        for arm, pair in found.items():
            if pair.others:
                table.notes.append(f"{arm}: {pair.others}")
        return [table]

    def figures(self) -> list[tuple[str, str]]:
        """[(title, SVG)]"""
        drawn: list[tuple[str, str | None]] = []
        if self.view == "memory":
            drawn.append(("Peak memory against the context", figures.memory(self)))
        elif self.view == "throughput":
            drawn.append(("Speed as a share of the reference's", figures.throughput(self)))
        elif self.view == "capacity":
            drawn.append(("Largest context", figures.capacity({arm: Pair(self, arm) for arm in self.arms})))
        drawn += [(f"Windows of the policy {arm}", figures.policy(policy)) for arm, policy in self.policies().items()]
        return [(title, svg) for title, svg in drawn if svg]


def _at(frame: Any, arm: str, n_ctx: int, name: str) -> float | None:
    """A value of a frame of (arm, n_ctx), None where there is none."""
    if (arm, n_ctx) not in frame.index:
        return None
    value = frame.at[(arm, n_ctx), name]
    return None if value != value else float(value)  # NaN is not itself


class Pair:
    """The measured boundary of one arm."""

    def __init__(self, section: Section, arm: str) -> None:
        self.arm = arm
        self.rows = [row for row in section.rows if row.arm == arm]
        good = [row for row in self.rows if row.step == "last success"]
        bad = [row for row in self.rows if row.step == "first failure"]
        # a search that was repeated on a finer grid leaves several pairs: the narrowest counts
        self.last_success = max((row.n_ctx for row in good or self.rows if good or row.status == "ok"), default=None)
        self.first_failure = min(
            (row.n_ctx for row in bad or self.rows if bad or row.status == "out of memory"), default=None
        )
        good, bad = (
            [row for row in rows if row.n_ctx == n_ctx]
            for rows, n_ctx in ((good, self.last_success), (bad, self.first_failure))
        )
        n_good, n_bad = sum(row.status == "ok" for row in good), sum(row.status == "out of memory" for row in bad)
        self.is_confirmed = n_good == n_bad == 3
        self.confirmed = (
            "yes"
            if self.is_confirmed
            else f"no: {n_good} of 3 ran, {n_bad} of 3 ran out"
            if good or bad
            else "no: not repeated"
        )
        self.charged = max(
            (row.limited_bytes for row in good if row.limited_bytes and row.status == "ok"), default=None
        )
        failure = next((row for row in bad if row.status == "out of memory"), None)
        self.cause = f"{failure.phase}: {failure.cause}" if failure else "-"
        self.at_boundary = next(
            (row for row in good if row.status == "ok" and row.predicted_peak_bytes and row.peak_bytes), None
        )
        other = [row for row in self.rows if row.status not in ("ok", "out of memory")]
        self.others = other and (
            f"{len(other)} runs ended otherwise and count for nothing, the first at {other[0].n_ctx:,}: "
            f"{other[0].cause}"
        )


def ideal(base: Pair, pair: Pair) -> float | None:
    """Gain at which the arm's predicted peak is that of the reference at its boundary; predictions between measured
    contexts are linear."""
    target = next(
        (row.predicted_peak_bytes for row in base.rows if row.n_ctx == base.last_success and row.predicted_peak_bytes),
        None,
    )
    points = sorted({(row.n_ctx, row.predicted_peak_bytes) for row in pair.rows if row.predicted_peak_bytes})
    if target is None or len(points) < 2:
        return None
    above = next((i for i, (_, n_bytes) in enumerate(points) if n_bytes >= target), len(points) - 1)
    (n0, b0), (n1, b1) = points[max(above - 1, 0)], points[max(above, 1)]
    return (n0 + (target - b0) * (n1 - n0) / (b1 - b0)) / base.last_success if b1 > b0 else None


def ideal_kv(base: Pair, pair: Pair) -> float | None:
    """Gain at which the nominal KV bytes of the policy are those of the reference at its boundary."""

    def n_bytes(row: ServerRow, n: int) -> int:
        return sum(
            size * min(n, window + row.n_sink if window else n)
            for _, size, windows in row.kv_layers or ()
            for window in windows
        )

    assert base.last_success
    target = n_bytes(base.rows[0], base.last_success)
    low, high = 1, 2**26
    if n_bytes(pair.rows[0], high) <= target:
        return None  # every head has a window: no context is too long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if n_bytes(pair.rows[0], middle) <= target else (low, middle)
    return low / base.last_success


def make_sections(rows: Sequence[ServerRow]) -> list[Section]:
    """Sections in the order memory, throughput, capacity; rows of a run's preparation are left out. Of a case that was
    tried again, the last row counts. Policies that were measured under one file name get their fingerprints into their
    arms' names."""
    sets: dict[tuple, list[ServerRow]] = {}
    for row in {row.key: row for row in rows}.values():
        if row.step != "process":
            if missing := [name for name in NEEDED if getattr(row, name) is None]:
                raise HwkvError(
                    f"the row of {row.arm} at {row.n_ctx:,} tokens cannot be compared: key '{missing[0]}' is missing"
                )
            key = (
                row.kind,
                str(row.machine),
                row.build_pair,
                row.model_sha256,
                str(row.settings),
                row.memory_limit_bytes,
            )
            sets.setdefault(key, []).append(row)
    for key, held in sets.items():
        policies: dict[str, set[str | None]] = {}
        for row in held:
            policies.setdefault(row.arm, set()).add(row.policy_fingerprint)
        sets[key] = [
            row.model_copy(update={"arm": f"{row.arm} {(row.policy_fingerprint or 'none')[:8]}"})
            if len(policies[row.arm]) > 1
            else row
            for row in held
        ]
    views = {"grid": ("memory", "throughput"), "capacity": ("capacity",)}
    sections = [Section(sets[key], view) for view in VIEWS for key in sets if view in views[key[0]]]
    return [
        s for s in sections if s.view != "throughput" or any(row.prefill_ts for row in s.rows)
    ]  # no failure is shown twice


def warnings(sections: Sequence[Section]) -> list[str]:
    """What the reader must know of rows that cannot be compared."""
    machines, builds = {str(s.rows[0].machine) for s in sections}, {s.rows[0].build_pair for s in sections}
    found = []
    if len(machines) > 1:
        found.append(
            f"These rows come from {len(machines)} machines. Each has sections of its own, and no ratio mixes them."
        )
    if len(builds) > 1:
        found.append(
            f"These rows come from {len(builds)} sets of builds. Each has sections of its own, and no ratio mixes them."
        )
    return found


def same_kv(row: ServerRow) -> bool:
    """True if the allocated KV bytes are the predicted ones: to the byte where the runtime told bytes, else to what its
    log shows."""
    if row.kv_bytes is None or row.predicted_kv_bytes is None:
        return False
    return abs(row.kv_bytes - row.predicted_kv_bytes) <= (0 if row.kv_bytes_source == "props" else 0.006 * MIB)


def kv_note(rows: Sequence[ServerRow]) -> str:
    return f"Predicted KV bytes are the allocated ones in {sum(map(same_kv, rows))} of {len(rows)} cases."


def mib(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / MIB:,.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def tokens(n: int | None) -> str:
    return "-" if n is None else f"{n:,}"


def failures(rows: Sequence[ServerRow]) -> str:
    return "; ".join(dict.fromkeys(f"{row.status} in {row.phase}" for row in rows))
