"""hwkv report: right medians and ratios, nothing mixed that must not be, one page that needs nothing else."""

import csv
import re
from pathlib import Path

import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.measure import records
from hwkv_llamacpp.measure.rows import ServerRow
from hwkv_llamacpp.report import comparison
from hwkv_llamacpp.report import page as report

MIB = 2**20
MACHINE = {"system": "Linux x86_64", "cpu": "a CPU", "n_cpus": 2, "memory_bytes": 16 * 2**30}
FULL = [[0, 256, [None, None]]]
HALF = [[0, 256, [None, 512]]]


def row(kind, arm, n_ctx, round_=0, status="ok", **more):
    policy = (
        {}
        if arm in ("upstream", "full")
        else {"policy": f"{arm}.json", "policy_fingerprint": "abc", "kv_layers": HALF, "retention": 0.5}
    )
    common = {
        "status": status,
        "machine": MACHINE,
        "build": "cpu",
        "build_pair": "b1",
        "upstream_commit": "0c1e570",
        "commit": "1234567",
        "model": "m.gguf",
        "model_sha256": "f" * 64,
        "model_bytes": 5 * MIB,
        "n_ctx_train": 4096,
        "settings": {"n_ubatch": 512, "n_threads": 1},
        "kv_layers": FULL,
        "peak_counts": "resident set, high-water mark",
        "retention": 1.0,
        "kv_bytes_source": "props",
    }
    return ServerRow(kind=kind, arm=arm, n_ctx=n_ctx, round=round_, **{**common, **policy, **more})


def memory_rows():
    peaks = {"upstream": (100, 104, 102), "full": (103, 104, 105), "p": (50, 78, 51)}
    return [
        row(
            "grid",
            arm,
            2048,
            i,
            peak_bytes=peak * MIB,
            predicted_peak_bytes=peak * MIB + MIB,
            kv_bytes=8 * MIB,
            predicted_kv_bytes=8 * MIB,
        )
        for arm, values in peaks.items()
        for i, peak in enumerate(values)
    ]


def capacity_rows():
    rows = []
    for arm, good, per_token in (("upstream", 10240, 20), ("p", 17408, 11)):
        for i in range(3):
            rows += [
                row("capacity", arm, good, i, step="last success", predicted_peak_bytes=10**6 + good * per_token),
                row(
                    "capacity",
                    arm,
                    good + 1024,
                    i,
                    "out of memory",
                    step="first failure",
                    phase="prefill",
                    cause="killed by the kernel",
                    predicted_peak_bytes=10**6 + (good + 1024) * per_token,
                ),
            ]
    return rows


def test_medians_and_ratios_within_repetitions():
    (section,) = comparison.make_sections(memory_rows())
    assert section.arms == ["upstream", "full", "p"]
    assert section.median("p", 2048, "peak_bytes") == 51 * MIB
    assert section.ratio("p", 2048, "peak_bytes") == pytest.approx(
        0.5
    )  # of 0.5, 0.75 and 0.5; of the medians it would be 0.5, too
    assert section.ratio("full", 2048, "peak_bytes") == pytest.approx(
        1.0294, abs=1e-4
    )  # the medians alone would say 1.0196
    (table,) = section.tables()
    assert table.rows[2][:4] == ["2,048, p", "51.0", "50.0, 78.0, 51.0", "0.500"]
    assert table.notes == [
        "Predicted KV bytes are the allocated ones in 9 of 9 cases. "
        "The predicted peak is at most 2.0% off the measured one."
    ]


def test_a_repetition_that_failed_has_no_ratio_and_is_shown():
    rows = memory_rows()
    rows[6] = rows[6].model_copy(update=dict(status="timeout", phase="prefill", peak_bytes=None))
    (section,) = comparison.make_sections(rows)
    assert section.ratio("p", 2048, "peak_bytes") == pytest.approx((78 / 104 + 51 / 102) / 2)
    for i in (7, 8):
        rows[i] = rows[i].model_copy(update=dict(status="timeout", phase="prefill", peak_bytes=None))
    (section,) = comparison.make_sections(rows)
    assert section.tables()[0].rows[2][1:4] == ["-", "timeout in prefill", "-"]


def test_different_instruments_have_no_ratio():
    rows = memory_rows()
    rows[6:] = [r.model_copy(update=dict(peak_counts="cgroup")) for r in rows[6:]]
    assert comparison.make_sections(rows)[0].ratio("p", 2048, "peak_bytes") is None


@pytest.mark.parametrize(
    "change, what",
    [
        ({"machine": {**MACHINE, "n_cpus": 64}}, "2 machines"),
        ({"build_pair": "b2"}, "2 sets of builds"),
        ({"settings": {"n_ubatch": 128}}, None),
        ({"model_sha256": "e" * 64}, None),
    ],
)
def test_what_differs_is_never_in_one_ratio(change, what):
    rows = memory_rows()
    rows[6:] = [r.model_copy(update=change) for r in rows[6:]]
    sections = comparison.make_sections(rows)
    assert len(sections) == 2
    assert sections[1].reference is None and sections[1].ratio("p", 2048, "peak_bytes") is None
    text = report.markdown(sections)
    assert (what in text if what else not comparison.warnings(sections)) and "0.500" not in text


def test_kv_bytes_that_are_not_the_predicted_ones_are_counted():
    rows = memory_rows()
    rows[0] = rows[0].model_copy(update=dict(kv_bytes=8 * MIB + 1))
    assert "in 8 of 9 cases" in comparison.make_sections(rows)[0].tables()[0].notes[0]
    rows[0] = rows[0].model_copy(update=dict(kv_bytes_source="log"))  # which shows two digits of a MiB
    assert "in 9 of 9 cases" in comparison.make_sections(rows)[0].tables()[0].notes[0]


def test_a_capacity_gain_is_compared_with_both_ideals():
    (section,) = comparison.make_sections(capacity_rows())
    (table,) = section.tables()
    gain, with_all, kv_alone, shares = table.rows[1][6:]
    assert gain == "1.700"
    assert with_all == f"{10240 * 20 / 11 / 10240:.3f}"
    # 512 bytes for a token of full KV; with half of the heads at 512 tokens, 256 for a token and 256 x 512 for good
    assert float(kv_alone) == pytest.approx((512 * 10240 - 256 * 512) / 256 / 10240, abs=1e-3)
    assert shares == "93.5%, 87.2%"
    assert table.rows[1][3:6] == ["yes", "prefill: killed by the kernel", "-"]


def test_a_pair_that_is_not_confirmed_says_so():
    rows = capacity_rows()
    rows[-1] = rows[-1].model_copy(update=dict(status="ok"))
    assert comparison.make_sections(rows)[0].tables()[0].rows[1][3] == "no: 3 of 3 ran, 2 of 3 ran out"
    rows = [r.model_copy(update=dict(step="search")) for r in rows]
    section = comparison.make_sections(rows)[0]
    assert (
        section.tables()[0].rows[1][3] == "no: not repeated"
        and ("policy p", "abc, no boundary was measured") in section.about()
    )
    crashed = [*capacity_rows(), row("capacity", "p", 20480, 0, "failed", step="search", cause="killed by SIGSEGV")]
    (table,) = comparison.make_sections(crashed)[0].tables()
    assert table.rows[1][1:3] == ["17,408", "18,432"]  # a crash moves no boundary
    assert table.notes[-1] == "p: 1 runs ended otherwise and count for nothing, the first at 20,480: killed by SIGSEGV"


def test_what_the_limit_counted_is_shown():
    rows = [
        r.model_copy(
            update=dict(memory_limit_bytes=100 * MIB, memory_limit_kind="cgroup v2", cgroup_peak_bytes=99 * MIB)
        )
        for r in capacity_rows()
    ]
    (table,) = comparison.make_sections(rows)[0].tables()
    assert [r[5] for r in table.rows] == ["99.0", "99.0"] and any(
        "counted against the limit" in note for note in table.notes
    )


def test_a_policy_whose_every_head_has_a_window_has_no_ideal():
    rows = [r.model_copy(update=dict(kv_layers=[[0, 256, [512, 512]]])) if r.arm == "p" else r for r in capacity_rows()]
    assert comparison.make_sections(rows)[0].tables()[0].rows[1][8] == "-"


def test_the_narrowest_of_several_pairs_counts():
    """A search on a grid of 1,024 and, after it, one on a finer grid."""
    finer = [
        row("capacity", "upstream", n, i, status, step=step)
        for i in range(3)
        for n, status, step in ((10496, "ok", "last success"), (10752, "out of memory", "first failure"))
    ]
    for rows in (capacity_rows() + finer, finer + capacity_rows()):
        (section,) = comparison.make_sections(rows)
        pair = comparison.Pair(section, "upstream")
        assert (pair.last_success, pair.first_failure, pair.confirmed) == (10496, 10752, "yes")


def test_policies_of_one_file_name_are_arms_of_their_own():
    """As when a policy is calibrated anew between two runs."""
    rows = memory_rows()
    other = [
        r.model_copy(update=dict(policy_fingerprint="1234567890abcdef", peak_bytes=r.peak_bytes * 3))
        for r in rows
        if r.arm == "p"
    ]
    (section,) = comparison.make_sections(rows + other)
    assert section.arms == ["upstream", "full", "p abc", "p 12345678"]
    assert section.ratio("p abc", 2048, "peak_bytes") == pytest.approx(0.5) and section.ratio(
        "p 12345678", 2048, "peak_bytes"
    ) == pytest.approx(1.5)
    assert {"policy p abc", "policy p 12345678"} <= {what for what, _ in section.about()}


def test_a_name_with_brackets_is_shown_whole(capsys):
    comparison.Table("of run[final]", ["arm"], [["run[final]"]]).print()
    assert capsys.readouterr().out.count("run[final]") == 2


def test_a_row_that_tells_too_little_is_named():
    with pytest.raises(HwkvError, match="the row of full at 2,048 tokens cannot be compared: key 'machine' is missing"):
        comparison.make_sections([row("grid", "full", 2048, machine=None)])


def test_preparation_is_part_of_no_result():
    rows = [row("grid", "full", 2048, step="process", peak_bytes=1)]
    assert comparison.make_sections(rows) == []


# the command


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "run.jsonl"
    speed = {"upstream": 100, "full": 99, "p": 150}
    grid = [
        one.model_copy(
            update=dict(
                n_ctx=n_ctx, prefill_ts=speed[one.arm], decode_ts=speed[one.arm] / 10, n_prefill=2000, n_decode=64
            )
        )
        for n_ctx in (2048, 8192)
        for one in memory_rows()
    ]
    for one in (*grid, *capacity_rows()):
        records.append(path, one)
    return path


def test_three_files(hwkv, runs, tmp_path):
    code, out, err = hwkv("report", runs, "-o", tmp_path / "report")
    assert code == 0, err
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<svg") == 6  # memory, speed, capacity, and the windows of p beside each
    assert re.findall("<h2>(.*?)</h2>", page) == ["Memory: m.gguf", "Throughput: m.gguf", "Capacity: m.gguf"]
    assert not re.search(r'(src|href)="(?!#)', re.sub(r"xlink:href=\"#|xmlns[^ ]*", "", page))  # nothing is fetched
    assert "1.500" in page and "@media print" in page
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| 2,048, p | 51.0 | 50.0, 78.0, 51.0 | 0.500 |" in text and "## Throughput: m.gguf" in text
    with open(tmp_path / "report" / "report.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 18 + 12
    assert table[0]["peak_bytes"] == str(100 * MIB) and table[0]["set_n_ubatch"] == "512"

    again = hwkv("report", runs, "-o", tmp_path / "report")
    assert again[0] == 1 and "exists already; --force replaces it" in again[2]
    hwkv("report", runs, "-o", tmp_path / "report", "--force")
    assert (tmp_path / "report" / "report.html").read_text() == page  # the same rows, the same page


def test_without_a_folder_it_prints(hwkv, runs):
    code, out, _ = hwkv("report", runs)
    assert code == 0 and out.startswith("# Measurements")


def test_a_case_measured_twice_counts_once(hwkv, runs):
    before = hwkv("report", runs)[1]
    assert hwkv("report", runs, runs)[1] == before


def test_bad_input_is_one_sentence(hwkv, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert hwkv("report", empty)[::2] == (1, f"error: {empty}: no rows\n")
    assert (
        hwkv("report", tmp_path / "none.jsonl")[2] == f"error: {tmp_path / 'none.jsonl'}: cannot read: no such file\n"
    )
    other = Path(__file__).parent.parent / "bench" / "results" / "speed.jsonl"
    assert hwkv("report", other)[::2] == (
        1,
        f"error: {other}: rows of the kind 'speed' have no report: the rows of hwkv bench expected\n",
    )
