"""hwkv bench on the real llama-server: what is measured agrees with what was predicted, and the common ends are what
they are."""

import dataclasses
import itertools
import os
import statistics

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.measure import case as measure
from hwkv_llamacpp.measure import memory_limit, records
from hwkv_llamacpp.policy.footprint import predict
from hwkv_llamacpp.report.comparison import same_kv
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

MIB = 2**20
N_CTX = 6144

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def built():
    try:
        native.binary("llama-server")
        native.binary("llama-server", upstream=True)
    except HwkvError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def policy_path(mini_hybrid, tmp_path_factory):
    """7 of 8 KV heads keep 64 tokens."""
    path = tmp_path_factory.mktemp("policy") / "short.json"
    uniform(ModelGeometry.from_gguf(mini_hybrid), 64, [(3, 0)]).save(path)
    return path


@pytest.fixture(scope="module")
def run(mini_hybrid, policy_path, tmp_path_factory):
    """Rows of one run of all arms."""
    from hwkv_llamacpp.cli.main import main

    out = tmp_path_factory.mktemp("run") / "run.jsonl"
    words = ["--policy", policy_path, "-c", f"1024,{N_CTX}", "-r", 1, "-t", 1, "-ub", 128, "-n", 8, "-o", out]
    assert main(["bench", "memory", *map(str, [mini_hybrid, *words])]) == 0
    return [row for row in records.read(out) if row.step is None]


def test_allocated_kv_is_the_predicted_one_in_every_row(run):
    assert len(run) == 6
    assert all(same_kv(row) for row in run)
    assert [row.kv_bytes_source for row in run if row.arm == "short"] == ["props", "props"]
    # a rule that takes anything would not notice this
    assert not same_kv(run[0].model_copy(update=dict(kv_bytes=run[0].kv_bytes + 65536)))


def test_the_predicted_peak_is_near_the_measured_one(run):
    for row in run:
        assert row.peak_counts == "resident set, high-water mark"
        assert row.predicted_peak_bytes == pytest.approx(
            row.peak_bytes, rel=0.06
        )  # 3 % on models of some size; this one is all process


def test_the_peak_is_between_breakdown_and_high_water_mark(run):
    for row in run:
        assert (
            sum(sum(parts.values()) for parts in row.breakdown.values())
            < row.rss_sampled_peak_bytes
            <= row.rss_peak_bytes
        )
        assert row.rss_anon_peak_bytes + row.rss_file_peak_bytes >= row.rss_sampled_peak_bytes
        assert max(n_bytes for _, n_bytes in row.samples) == row.rss_sampled_peak_bytes and row.n_samples > 5


def test_every_prompt_is_read_whole(run):
    for row in run:
        assert (row.n_prefill, row.n_cached, row.n_decode) == (row.n_ctx - 8, 0, 8)
        assert row.prefill_ts == pytest.approx(row.n_prefill / row.prefill_ms * 1000)


def test_arms_differ_by_their_kv(run):
    """Both arms with full KV hold the same; the policy saves its KV bytes, less what its masks take."""
    upstream, full, short = (
        next(row for row in run if row.arm == arm and row.n_ctx == N_CTX) for arm in ("upstream", "full", "short")
    )
    assert full.peak_bytes == pytest.approx(upstream.peak_bytes, rel=0.02)
    saved = full.kv_bytes - short.kv_bytes
    assert saved > 9 * MIB
    assert full.peak_bytes - short.peak_bytes == pytest.approx(saved, rel=0.15)


@pytest.fixture
def case(mini_hybrid, policy_path):
    """case(n_ctx, ...) -> Row of the policy arm."""
    geometry = ModelGeometry.from_gguf(mini_hybrid)
    policy = Policy.load(policy_path)

    def run(n_ctx, arm=None, **settings):
        settings = measure.Settings(
            mini_hybrid, **{"n_predict": 8, "n_threads": 1, "n_ubatch": 128, "timeout_s": 120, **settings}
        )
        return measure.measure(
            "grid", arm or measure.Arm("short", path=policy_path, policy=policy), n_ctx, settings, geometry
        )

    return run


@pytest.mark.parametrize("n_ctx, limit, phase", [(65536, 24, "start"), (32768, 36, "prefill")])
def test_the_kernels_limit_is_out_of_memory(case, mini_hybrid, policy_path, n_ctx, limit, phase):
    """At 65,536 tokens KV alone is above the limit. At 32,768 the server starts, and the buffers that a long prompt
    touches do not fit."""
    arm = measure.Arm("full") if phase == "start" else None
    row = case(n_ctx, arm, memory_limit_bytes=limit * MIB)
    if not row.memory_limit_kind.startswith("cgroup"):
        pytest.skip("no control group can be made here")
    assert (row.status, row.phase, row.exit_code) == ("out of memory", phase, -9)
    assert row.cause == "killed by the kernel: the control group's limit"
    assert row.log_tail and row.rss_peak_bytes <= (limit + 24) * MIB  # library pages are not charged
    # of what is killed, too, the row tells what had been allocated
    assert row.breakdown["CPU"]["model"] > 3 * MIB
    if phase == "prefill":
        predicted = predict(ModelGeometry.from_gguf(mini_hybrid), Policy.load(policy_path), n_ctx, n_ubatch=128)
        assert (row.kv_bytes, row.kv_bytes_source) == (predicted.kv_bytes, "props")
        assert row.breakdown["CPU"]["context"] == pytest.approx(row.kv_bytes + row.recurrent_bytes, abs=0.1 * MIB)


def test_an_address_space_limit_makes_allocations_fail(case, monkeypatch):
    monkeypatch.setattr(memory_limit, "_own_groups", lambda: [])
    row = case(1_000_000, measure.Arm("full"), memory_limit_bytes=1500 * MIB)
    assert (row.status, row.phase, row.memory_limit_kind) == ("out of memory", "start", "address space")
    assert "allocate" in row.cause


def test_a_request_that_takes_too_long_is_no_boundary(case):
    row = case(16384, timeout_s=0.3)
    assert (row.status, row.phase, row.cause) == ("timeout", "prefill", "no end after 0.3 s")


def test_a_file_that_is_no_model_is_no_boundary(case, tmp_path, mini_hybrid):
    """A cut file is refused before anything starts; one that llama.cpp alone finds fault with has failed, and not for
    want of memory."""
    whole, geometry = mini_hybrid.read_bytes(), ModelGeometry.from_gguf(mini_hybrid)
    cut, renamed = tmp_path / "cut.gguf", tmp_path / "renamed.gguf"
    cut.write_bytes(whole[:-100_000])
    with pytest.raises(HwkvError, match="cut.gguf: truncated: its tensors need"):
        measure.measure("grid", measure.Arm("full"), 1024, measure.Settings(cut, n_predict=8, n_threads=1), geometry)
    assert whole.count(b"output_norm.weight") == 1
    renamed.write_bytes(whole.replace(b"output_norm.weight", b"output_mean.weight"))
    row = measure.measure(
        "grid", measure.Arm("full"), 1024, measure.Settings(renamed, n_predict=8, n_threads=1), geometry
    )
    assert (row.status, row.phase) == ("failed", "start")
    assert "output_norm.weight" in row.cause


def test_another_server_on_the_port_is_not_taken_for_ours(case, mini_hybrid, monkeypatch):
    """A real one, of the same model, on the port that ours was told."""
    options = measure.Settings.options
    with LlamaServer(ServerOptions(model=mini_hybrid, policy="off", n_ctx=512, n_threads=1)) as stranger:
        port = stranger.port
        monkeypatch.setattr(measure.Settings, "options", lambda *words: dataclasses.replace(options(*words), port=port))
        for arm in (measure.Arm("full"), None):
            row = case(512, arm)
            assert (row.status, row.phase, row.exit_code) == ("failed", "start", 1)
            assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in row.cause
            assert row.prefill_ts is row.decode_ts is row.n_prefill is None
        monkeypatch.undo()
        assert case(512).status == "ok"  # on a port that is free
        assert stranger.props()["default_generation_settings"]["n_ctx"] == 512


def test_how_weights_are_loaded_changes_no_difference(case, mini_hybrid):
    """Whether weights are file pages or not, in the page cache or not, the arms differ by the same, which is their KV
    less the masks."""
    saved, kv_saved = [], 0
    for mode, is_cold in itertools.product(("none", "mmap"), (False, True)):
        rows = []
        for arm in (measure.Arm("full"), None):
            if is_cold:
                with open(mini_hybrid, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            rows.append(case(4096, arm, load_mode=mode))
        full, short = rows
        assert (full.rss_file_peak_bytes > 17 * MIB) == (mode == "mmap")  # libraries, and 3 MiB of weights
        # how many file pages are mapped depends on the page cache: the row keeps them apart
        kv_saved = full.kv_bytes - short.kv_bytes
        saved.append(full.rss_anon_peak_bytes - short.rss_anon_peak_bytes)
    # one of the server's threads takes 1.2 MiB or does not, from start to start
    assert all(kv_saved - 3 * MIB < n_bytes < kv_saved + 1.3 * MIB for n_bytes in saved), (saved, kv_saved)


def test_the_order_of_arms_changes_no_peak(case):
    peaks = [case(2048, arm).peak_bytes for arm in (measure.Arm("full"), None, None, measure.Arm("full"))]
    assert peaks[0] == pytest.approx(peaks[3], rel=0.02) and peaks[1] == pytest.approx(peaks[2], rel=0.02)


def test_repetitions_are_as_fast_as_the_first(case):
    speeds = [case(2048).prefill_ts for _ in range(3)]
    assert max(speeds) < 3 * statistics.median(speeds)  # a prompt cache would be far faster
