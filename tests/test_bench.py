"""hwkv bench and its parts, with a stand-in for the server: every end has its cause, nothing is left behind, a stopped
run goes on."""

import contextlib
import dataclasses
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
from pydantic import ValidationError

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.measure import boundary, ending, memory_limit, records
from hwkv_llamacpp.measure import case as measure
from hwkv_llamacpp.measure.rows import KINDS, ServerRow
from hwkv_llamacpp.report.comparison import make_sections
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

STANDIN = Path(__file__).parent / "standin.py"
POLICY = {"format": "hwkv-policy", "version": 1, "layers": [{"layer": 3, "windows": ["full", 64, 64, 64]}]}


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """Builds whose llama-server is the stand-in; standin("oom-prefill") scripts its end."""
    for group in ("hwkv", "upstream"):
        folder = tmp_path / group / "cpu" / "bin"
        folder.mkdir(parents=True)
        program = folder / "llama-server"
        program.write_text(f"#!{sys.executable} -SE\n{STANDIN.read_text()}")
        program.chmod(0o755)
    monkeypatch.setenv("HWKV_BUILD", str(tmp_path / "hwkv" / "cpu"))
    yield lambda end: monkeypatch.setenv("STANDIN", end)
    left = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert left == [], "a server was left behind"


@pytest.fixture
def policy(tmp_path, monkeypatch, mini_hybrid):
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(POLICY))
    fingerprint = Policy.load(path).fingerprint(ModelGeometry.from_gguf(mini_hybrid).n_layer)
    monkeypatch.setenv("STANDIN_FINGERPRINT", fingerprint)
    return path


@pytest.fixture
def case(standin, mini_hybrid):
    """case("oom-prefill", timeout_s=...) -> Row of an arm, the full one, at 1024 tokens."""
    geometry = ModelGeometry.from_gguf(mini_hybrid)

    def run(end, arm=None, **settings):
        standin(end)
        settings = measure.Settings(mini_hybrid, n_predict=4, **{"timeout_s": 20, "start_timeout_s": 20, **settings})
        return measure.measure("grid", arm or measure.Arm("full"), 1024, settings, geometry)

    return run


# ends


@pytest.mark.parametrize(
    "end, status, phase, cause",
    [
        ("ok", "ok", "end", None),
        ("oom-start", "out of memory", "start", "failed to allocate buffer of size 123456789"),
        ("oom-prefill", "out of memory", "prefill", "failed to allocate buffer of size 123456789"),
        ("oom-decode", "out of memory", "decode", "failed to allocate buffer of size 123456789"),
        ("abort-prefill", "failed", "prefill", "killed by SIGABRT"),
        ("segfault-decode", "failed", "decode", "killed by SIGSEGV"),
        ("kill-prefill", "failed", "prefill", "killed by SIGKILL"),  # by somebody: not by the kernel for memory
        ("exit0-start", "failed", "start", "exit code 0"),
        ("exit0-decode", "failed", "decode", "exit code 0"),
        ("error-start", "failed", "start", "exit code 3: error: something else"),
        ("garbage", "failed", "prefill", "something else than JSON"),
        (
            "cached",
            "failed",
            "decode",
            "1020 prompt tokens and 4 generated ones expected, llama-server reports 1 (and 1019 from a cache) and 4",
        ),
        ("short", "failed", "decode", "reports 1020 (and 0 from a cache) and 1"),
    ],
)
def test_every_end_has_its_cause(case, end, status, phase, cause):
    row = case(end)
    assert (row.status, row.phase) == (status, phase)
    assert row.cause is None if cause is None else cause in row.cause
    assert row.wall_s < 15  # nobody waited for a timeout


@pytest.mark.parametrize(
    "end, phase, settings",
    [
        ("hang-start", "start", {"start_timeout_s": 1}),
        ("hang-prefill", "prefill", {"timeout_s": 1}),
        ("hang-decode", "decode", {"timeout_s": 5}),
    ],
)
def test_a_hang_ends_at_the_timeout(case, end, phase, settings):
    row = case(end, **settings)
    assert (row.status, row.phase, row.cause) == ("timeout", phase, f"no end after {next(iter(settings.values()))} s")
    assert row.wall_s < 15


# a stranger


@pytest.fixture
def arms(policy):
    """One of each kind of arm."""
    arms = [measure.Arm("upstream", upstream=True), measure.Arm("full")]
    return {arm.name: arm for arm in (*arms, measure.Arm("windows", path=policy, policy=Policy.load(policy)))}


@pytest.mark.parametrize("arm", ["upstream", "full", "windows"])
@pytest.mark.parametrize("end", ["other-model", "other-policy", "other-build"])
def test_a_server_with_another_model_policy_or_build_is_not_measured(case, arms, arm, end):
    row = case(end, arms[arm])
    assert (row.status, row.phase) == ("failed", "start")
    fingerprint = arms["windows"].policy.fingerprint(8)
    wanted = {
        "other-model": "the server has loaded another.gguf, mini-hybrid-f16.gguf expected",
        "other-build": f"the server is {'not the' if arm == 'upstream' else 'the'} unpatched llama-server",
        "other-policy": {
            "upstream": "the server is not the unpatched llama-server",
            "full": "the server runs policy 0123456789abcdef, full KV expected",
            "windows": f"the server runs policy 0123456789abcdef, policy {fingerprint} expected",
        }[arm],
    }[end]
    assert row.cause == wanted
    assert row.prefill_ts is row.decode_ts is row.n_prefill is None


def test_every_arm_is_measured_by_the_server_of_its_own(case, arms):
    assert {name: case("ok", arm).status for name, arm in arms.items()} == dict.fromkeys(arms, "ok")


class Stranger(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything, with speeds of its own."""

    ANSWER = json.dumps({"status": "ok", "tokens": [1], "timings": {"prompt_n": 1020, "predicted_n": 4}}).encode()

    def do_GET(self):
        self.server.n_asked += 1  # before who asked goes on
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.ANSWER)))
        self.end_headers()
        self.wfile.write(self.ANSWER)

    do_POST = do_GET

    def log_message(self, *words):
        pass


@pytest.fixture
def stranger():
    """stranger(port) listens there from then on; 0: anywhere. Returns the server, which counts what it is asked."""
    with contextlib.ExitStack() as stack:

        def listen(port=0):
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", port), Stranger))
            server.n_asked = 0
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield listen


def test_a_stranger_on_the_port_is_never_asked(case, stranger, monkeypatch):
    """A port that was free a moment ago and now is somebody else's."""
    server = stranger()
    monkeypatch.setattr(measure.Settings, "options", with_port(measure.Settings.options, server.server_address[1]))
    row = case("ok")
    assert (row.status, row.phase, row.exit_code) == ("failed", "start", 1)
    assert "Address already in use" in row.cause
    assert row.prefill_ts is row.decode_ts is row.n_prefill is None
    assert server.n_asked == 0


def test_a_stranger_that_takes_the_port_of_a_dead_server_is_not_believed(standin, stranger, mini_hybrid):
    standin("ok")
    with LlamaServer(ServerOptions(model=mini_hybrid, policy="off", n_ctx=512)) as server:
        assert server.get("/props")["model_path"] == str(mini_hybrid)
        server.process.kill()
        server.process.wait()
        other = stranger(server.port)
        for ask in (
            lambda: server.get("/props"),
            lambda: server.post("/completion", {"prompt": "x", "n_predict": 1}),
            lambda: list(server.stream("/completion", {"prompt": "x", "n_predict": 1})),
        ):
            with pytest.raises(HwkvError, match="llama-server ended on /.*: killed by SIGKILL"):
                ask()
        assert other.n_asked == 3  # they did answer


def with_port(options, port):
    """Settings.options() of servers that are told a port."""
    return lambda *words: dataclasses.replace(options(*words), port=port)


def test_what_a_phase_survived_is_not_its_end(tmp_path):
    class Server:
        process = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
        log = staticmethod(lambda: "a: failed to allocate buffer of size 1, retrying\nb: all is well\n")
        exit_cause = staticmethod(lambda: "killed by SIGABRT")

    Server.process.wait()
    assert ending.failed(Server, 1).status == "out of memory"
    assert ending.failed(Server, 1, since=Server.log().index("b:")).status == "failed"


@pytest.mark.parametrize(
    "line, is_memory",
    [
        ("CUDA error: out of memory", True),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 512.00 MiB on device 0: "
            "cudaMalloc failed: out of memory",
            True,
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", True),
        ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", True),
        ("ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: no error", False),
        ("GGML_ASSERT(n_tokens > 0) failed", False),
    ],
)
def test_what_counts_as_out_of_memory(line, is_memory):
    assert bool(ending.memory_line(f"$ command\n0.01.000 E {line}\n")) == is_memory


def test_the_kernels_kill_is_out_of_memory():
    """A real one, in a control group of 32 MiB; the address-space limit makes malloc fail instead."""
    with memory_limit.memory_group(32 * 2**20) as group:
        if not group.kind.startswith("cgroup"):
            pytest.skip("no control group can be made here")
        process = subprocess.Popen([sys.executable, "-c", "x = bytearray(256 * 2**20)"], preexec_fn=group.enter)
        assert process.wait(30) == -signal.SIGKILL
        assert group.n_oom_kills() >= 1
        assert group.peak_bytes() <= 32 * 2**20
        folder = group.folder
    assert not folder.exists()


def test_a_group_that_a_killed_run_left_is_removed():
    code = (
        "import os, signal\nfrom hwkv_llamacpp.measure import memory_limit\n"
        "with memory_limit.memory_group() as group:\n"
        "    print(getattr(group, 'folder', ''), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    if not left:
        pytest.skip("no control group can be made here")
    assert Path(left).exists()
    with memory_limit.memory_group():
        assert not Path(left).exists()


def test_address_space_limit_where_there_is_no_control_group(monkeypatch):
    monkeypatch.setattr(memory_limit, "_own_groups", lambda: [])
    with memory_limit.memory_group(256 * 2**20) as group:
        assert group.kind == "address space"
        done = subprocess.run(
            [sys.executable, "-c", "x = bytearray(512 * 2**20)"], preexec_fn=group.enter, capture_output=True, text=True
        )
        assert "MemoryError" in done.stderr


# rows


def test_rows_come_back_as_written(tmp_path):
    row = ServerRow(
        kind="grid",
        arm="full",
        n_ctx=2048,
        status="ok",
        peak_bytes=5,
        kv_layers=[[3, 256, [None, 64]]],
        settings={"n_predict": 4},
        samples=[[0.1, 5]],
    )
    path = tmp_path / "deep" / "rows.jsonl"
    records.append(path, row)
    records.append(path, row.model_copy(update=dict(round=1)))
    assert records.read(path) == [row, row.model_copy(update=dict(round=1))]


def test_a_row_that_does_not_fit_on_the_disk_is_an_error(tmp_path):
    """A write that the system cuts short, here at a file size limit."""
    script = f"""
import resource, signal
from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.measure import records
from hwkv_llamacpp.measure.rows import ServerRow
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    row = ServerRow(kind="grid", arm="full", n_ctx=2048, status="ok", cause="x" * 200)
    records.append({str(tmp_path / "rows.jsonl")!r}, row)
except HwkvError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'rows.jsonl'}: cannot write: the row was cut short; is the disk full?\n", (
        done.stderr
    )
    assert records.read(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize(
    "left", [b'{"kind": "grid", "arm": "full", "n_', b'{"ki', b"{", bytes(40)]
)  # NULs: the power failed
def test_a_line_cut_short_is_left_out_and_not_glued_to_the_next(tmp_path, capsys, left):
    path = tmp_path / "rows.jsonl"
    row = ServerRow(kind="grid", arm="full", n_ctx=2048, status="ok")
    records.append(path, row)
    path.write_bytes(path.read_bytes() + left)
    records.append(path, row.model_copy(update=dict(round=1)))
    assert [r.round for r in records.read(path)] == [0, 1]
    assert "line 2 was cut short" in capsys.readouterr().err


GOOD = {"kind": "grid", "arm": "full", "n_ctx": 1, "version": 1, "status": "ok"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("[1]", "holds [1], a JSON object expected"),
        ("nonsense", "not JSON: Expecting value at line 1 column 1"),
        ({"version": 2}, "key 'version' is 2, 1 expected"),
        ({"kind": "sped"}, f"key 'kind' is \"sped\", one of {', '.join(KINDS)} expected"),
        ({"speed": 1}, "key 'speed' is unknown; known are kind, arm, round, version, date, "),
        ({"arm": ...}, "key 'arm' is missing"),
        ({"status": "great"}, "key 'status' is \"great\", one of ok, out of memory, timeout, failed expected"),
        ({"n_ctx": 0}, "key 'n_ctx' is 0, an integer of 1 or more expected"),
        ({"n_ctx": "1"}, "key 'n_ctx' is \"1\", an integer of 1 or more expected"),
        ({"n_ctx": True}, "key 'n_ctx' is true, an integer of 1 or more expected"),
        ({"retention": 1.5}, "key 'retention' is 1.5, a number from 0 to 1 expected"),
        ({"step": "first"}, "key 'step' is \"first\", one of search, last success, first failure, process expected"),
        ({"samples": [[0.1, 1], ["x", 2]]}, "key 'samples[1]' is \"x\", [seconds, bytes] expected"),
        ({"machine": "x86_64"}, "key 'machine' is \"x86_64\", a JSON object expected"),
        (
            {"machine": {"system": "Linux", "n_cpus": "2"}},
            "key 'machine.n_cpus' is \"2\", an integer of 0 or more expected",
        ),
        ({"kind": "needle", "n_ctx": ..., "status": ...}, "key 'retention' is missing"),
        ({"kind": "off"}, "key 'n_ctx' is unknown; known are kind, arm, "),
    ],
)
def test_a_broken_row_is_named_with_file_line_key_and_value(tmp_path, hwkv, line, message):
    if isinstance(line, dict):
        line = json.dumps({key: value for key, value in {**GOOD, **line}.items() if value is not ...})
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    code, _, err = hwkv("report", path)
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"error: {path}: line 2: {message}")


def test_a_row_takes_no_wrong_value():
    """What could not be read again cannot be written."""
    row = ServerRow(kind="grid", arm="full", n_ctx=2048)
    with pytest.raises(ValidationError):
        row.peak_bytes = "much"
    with pytest.raises(ValidationError):
        row.settings = {"n_predict": [64]}
    with pytest.raises(ValidationError):
        ServerRow(kind="speed", arm="full", n_ctx=2048)


COMMITTED = sorted((Path(__file__).parent.parent / "bench" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_row_fits_the_one_schema(path, tmp_path, hwkv):
    """As this reader has it, and as another one has the JSON schema that is printed. Written again, it is the same."""
    code, text, _ = hwkv("report", "--schema")
    assert code == 0
    validator = jsonschema.Draft202012Validator(json.loads(text))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = records.read(path)
    assert len(rows) == len(lines) > 5 and {row.kind for row in rows} == {path.stem}
    for row, line in zip(rows, lines):
        validator.validate(line)
        assert not validator.is_valid({**line, "model_bytes": -1}) and not validator.is_valid({**line, "more": 1})
        assert row.date and row.model_sha256
        records.append(tmp_path / "again.jsonl", row)
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert again == lines


def test_every_kind_of_row_has_committed_rows():
    assert {row.kind for path in COMMITTED for row in records.read(path)} == set(KINDS)


# the search for a boundary


def search(fits, highest=200_000, guess=8000, grid=1024, lowest=1):
    """(Boundary, [(n_ctx, step, round) tried]); fits(n_ctx, step, round) -> status."""
    tried = []
    scan = boundary.scan(highest, guess, grid, lowest)
    asked = next(scan)
    try:
        while True:
            tried.append(asked)
            asked = scan.send(fits(*asked))
    except StopIteration as end:
        return end.value, tried


@pytest.mark.parametrize("guess", [1, 1024, 20_000, 37_888, 38_000, 199_000, 10**9])
def test_the_boundary_is_found_from_any_guess(guess):
    found, tried = search(lambda n, *_: "ok" if n <= 38_000 else "out of memory", guess=guess)
    assert (found.last_success, found.first_failure, found.confirmed) == (37 * 1024, 38 * 1024, True)
    assert len(tried) < 30
    assert [t for t in tried if t[1] != "search"] == [
        (n, step, r) for r in range(3) for n, step in ((37 * 1024, "last success"), (38 * 1024, "first failure"))
    ]


def test_disagreeing_repetitions_are_told_and_nothing_is_picked():
    found, _ = search(lambda n, step, r: "ok" if n <= 38_000 and (step, r) != ("last success", 1) else "out of memory")
    assert not found.confirmed
    assert found.note == "not confirmed: 2 of 3 runs succeeded at 37,888 tokens, 3 of 3 ran out of memory at 38,912"
    found, _ = search(lambda n, step, r: "ok" if n <= 38_000 or (step, r) == ("first failure", 2) else "out of memory")
    assert not found.confirmed and "2 of 3 ran out of memory at 38,912" in found.note


def test_a_crash_is_no_boundary():
    found, tried = search(lambda n, *_: "ok" if n <= 9000 else "failed", guess=12_000)
    assert (found.last_success, found.first_failure, found.confirmed) == (None, None, False)
    assert found.note == "no boundary: at 11,264 tokens the server ended otherwise, twice (failed)"
    assert tried == [(11 * 1024, "search", 0), (11 * 1024, "search", 1)]


def test_a_crash_that_does_not_come_back_is_passed_over():
    found, _ = search(
        lambda n, step, r: (
            "timeout" if n == 8192 and step == "search" and r == 0 else "ok" if n <= 38_000 else "out of memory"
        ),
        guess=8192,
    )
    assert found.confirmed


@pytest.mark.parametrize(
    "fits, note",
    [
        (lambda n, *_: "ok", "no failure up to 199,680 tokens, the highest tried"),
        (lambda n, *_: "out of memory", "not even 1,024 tokens fit"),
    ],
)
def test_no_boundary_in_reach(fits, note):
    found, _ = search(fits)
    assert (found.confirmed, found.note) == (False, note)


def test_the_search_stays_in_its_range():
    """From the least context that a prompt fits into to the highest asked for."""
    for fits, note in (
        (lambda n, *_: "ok", "no failure up to 3,072 tokens, the highest tried"),
        (lambda n, *_: "out of memory", "not even 2,048 tokens fit"),
    ):
        found, tried = search(fits, highest=4000, lowest=2000)
        assert found.note == note and {n for n, *_ in tried} <= {2048, 3072}


# the command


def bench(hwkv, *words):
    return hwkv("bench", *words, "-n", 4, "--timeout", 20, "--start-timeout", 20)


def test_a_grid_interleaves_its_arms_and_resumes(standin, hwkv, mini_hybrid, policy, tmp_path):
    out = tmp_path / "run.jsonl"
    code, text, err = bench(hwkv, "memory", mini_hybrid, "--policy", policy, "-c", "512,1024", "-r", 2, "-o", out)
    assert code == 0, err
    rows = records.read(out)
    assert len(rows) == 12 and {row.status for row in rows} == {"ok"}
    assert [row.arm for row in rows[:3]] == ["upstream", "full", "windows"]
    assert all(sorted(row.arm for row in rows[i : i + 3]) == ["full", "upstream", "windows"] for i in range(0, 12, 3))
    assert (
        len({row.arm for row in rows[:6:3]}) == len({row.arm for row in rows[::6]}) == 2
    )  # by context and by round another arm is first
    assert all(row.peak_bytes and row.samples and row.kv_bytes and row.machine and row.model_sha256 for row in rows)
    assert "--hwkv-policy" not in rows[0].arguments and "windows.json" in rows[2].arguments
    assert not any("/" in word for row in rows for word in row.arguments)  # no folders of this machine

    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:7]))
    code, _, err = bench(hwkv, "memory", mini_hybrid, "--policy", policy, "-c", "512,1024", "-r", 2, "-o", out)
    assert code == 0 and [row.key for row in records.read(out)] == [row.key for row in rows]
    assert len(err.splitlines()) == 5  # a line for each case that was missing

    code, speeds, err = bench(hwkv, "throughput", mini_hybrid, "--policy", policy, "-c", "512,1024", "-r", 2, "-o", out)
    assert code == 0 and not err and len(records.read(out)) == 12  # the same cases: nothing left to measure
    assert "Peak memory" in text and "per second" not in text and "Peak memory" not in speeds and "per second" in speeds


@pytest.mark.parametrize("end", ["hang-prefill>600", "segfault-prefill>600"])
def test_what_failed_is_tried_again(standin, hwkv, mini_hybrid, tmp_path, end):
    """And the report takes what came out then."""
    words = ["memory", mini_hybrid, "--arms", "full", "-c", "512,1024", "-r", "1", "-o", tmp_path / "run.jsonl"]
    standin(end)
    code, _, err = hwkv("bench", *words, "-n", 4, "--timeout", 1)
    assert code == 1 and "1 of 2 cases did not succeed, the first is full at 1024" in err
    standin("ok")
    code, text, err = bench(hwkv, *words)
    assert code == 0 and "1,024" in text, err
    rows = records.read(tmp_path / "run.jsonl")
    assert [(row.n_ctx, row.status == "ok") for row in rows] == [(512, True), (1024, False), (1024, True)]
    assert [row.status for section in make_sections(rows) for row in section.rows] == [
        "ok"
    ] * 4  # two views of two cases


def test_a_scan_finds_both_boundaries(standin, hwkv, mini_hybrid, policy, tmp_path):
    standin("oom-prefill>3000")
    out = tmp_path / "run.jsonl"
    code, _, err = bench(
        hwkv,
        "capacity",
        mini_hybrid,
        "--policy",
        policy,
        "--arms",
        "full,policy",
        "--memory-limit",
        "200MiB",
        "-o",
        out,
    )
    assert code == 0, err
    assert "full: 3 of 3 runs succeeded at 2,048 tokens, 3 of 3 ran out of memory at 3,072" in err
    assert "windows: 3 of 3 runs succeeded at 2,048 tokens, 3 of 3 ran out of memory at 3,072" in err
    rows = records.read(out)
    assert {row.memory_limit_kind for row in rows} <= {"cgroup v1", "cgroup v2", "address space"}
    code, _, err = bench(
        hwkv,
        "capacity",
        mini_hybrid,
        "--policy",
        policy,
        "--arms",
        "full,policy",
        "--memory-limit",
        "200MiB",
        "-o",
        out,
    )
    assert code == 0 and len(records.read(out)) == len(rows)  # everything was there


def test_a_scan_says_when_confirmations_disagree(standin, hwkv, mini_hybrid, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_COUNT", str(tmp_path / "count"))
    standin("flaky")
    code, _, err = bench(
        hwkv,
        "capacity",
        mini_hybrid,
        "--arms",
        "full",
        "--memory-limit",
        "200MiB",
        "--highest",
        8192,
        "-o",
        tmp_path / "run.jsonl",
    )
    assert code == 1 and "not confirmed" in err.splitlines()[-1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_no_server_and_goes_on(standin, hwkv, mini_hybrid, tmp_path, sent):
    standin("hang-prefill>600")
    out = tmp_path / "run.jsonl"
    words = ["memory", mini_hybrid, "--arms", "full", "-c", "512,1024", "-r", "1", "-o", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "hwkv_llamacpp", "bench", *map(str, words), "-n", "4"], stderr=subprocess.DEVNULL
    )
    server = wait_for(
        lambda: (
            out.exists() and [child for child in psutil.Process(process.pid).children() if "1024" in child.cmdline()]
        )
    )[0]
    process.send_signal(sent)
    assert process.wait(20) != 0
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert [row.n_ctx for row in records.read(out)] == [512]
    standin("ok")
    code, _, err = bench(hwkv, *words)
    assert code == 0 and [row.n_ctx for row in records.read(out)] == [512, 1024]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except psutil.Error:
            pass
        time.sleep(0.05)
    raise AssertionError("nothing happened in time")


def test_a_case_that_fails_makes_the_run_fail(standin, hwkv, mini_hybrid, tmp_path):
    standin("segfault-prefill>600")
    code, _, err = bench(
        hwkv, "memory", mini_hybrid, "--arms", "full", "-c", "512,1024", "-r", 1, "-o", tmp_path / "run.jsonl"
    )
    assert code == 1
    assert (
        err.splitlines()[-1]
        == "error: 1 of 2 cases did not succeed, the first is full at 1024: failed in prefill, killed by SIGSEGV"
    )


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["memory", "MODEL", "--arms", "ours", "-c", 512], 2, "'ours' is not an arm: upstream, full, policy expected"),
        (["memory", "MODEL", "-c", 512], 1, "the arm 'policy' needs --policy: MODEL carries none"),
        (
            ["memory", "MODEL", "--arms", "full", "-c", "512,big"],
            2,
            "'big' is not a number of tokens from 1 to 2147483647",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", "00000000000199999999999999"],
            2,
            "is not a number of tokens from 1 to 2147483647",
        ),
        (["memory", "MODEL", "--arms", "full", "-c", 512, "-t", -3], 2, "'-3' is not a number from 1 to 2147483647"),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 512, "--start-timeout", "inf"],
            2,
            "'inf' is not a number of seconds above 0 and up to 2147483647",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 512, "--timeout", "nan"],
            2,
            "'nan' is not a number of seconds above 0 and up to 2147483647",
        ),
        (["memory", "MODEL", "--arms", "full", "-c", 512, "--logs", "MODEL"], 1, "cannot write: File exists"),
        (
            ["memory", "MODEL", "--arms", "full", "--policy", "p.json", "-c", 512],
            1,
            "--policy p.json is given, but --arms has no policy",
        ),
        (
            ["capacity", "MODEL", "--arms", "full", "--memory-limit", "200MiB", "--highest", 500],
            1,
            "--highest is 500: no multiple of --grid 1024 from 5 up to it",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 4],
            1,
            "a context of 4 leaves no room for a prompt before 4 generated tokens",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 512, "--memory-limit", "2MiB"],
            1,
            "--memory-limit is 2 MiB, below the 3.1 MiB of the weights alone.",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 512, "--memory-limit", "lots"],
            2,
            "'lots' is not a size such as 24GiB, 24GB or 300MiB",
        ),
        (
            ["memory", "MODEL", "--arms", "full", "-c", 512, "-ngl", 99],
            1,
            "-ngl 99 asks for a GPU, and the build in use (cpu) has none: run ./build.sh --cuda or --vulkan.",
        ),
        (
            ["capacity", "MODEL", "--arms", "full"],
            1,
            "on a CPU the capacity needs --memory-limit, such as 3GiB: without one the machine itself would run out.",
        ),
        (["memory", "no.gguf", "--arms", "full", "-c", 512], 1, "no.gguf: cannot read: No such file or directory"),
        (["memory", "MODEL", "--policy", "no.json", "-c", 512], 1, "no.json: cannot read: No such file or directory"),
        (["memory", "MODEL", "--arms", "full", "-c", 512, "-r", 0], 2, "'0' is not a number from 1 to 2147483647"),
    ],
)
def test_bad_input_is_one_sentence(standin, hwkv, mini_hybrid, tmp_path, words, code, message):
    out = tmp_path / "run.jsonl"
    got, _, err = bench(hwkv, *[mini_hybrid if word == "MODEL" else word for word in words], "-o", out)
    assert got == code
    assert err.splitlines()[-1].endswith(message.replace("MODEL", str(mini_hybrid)))
    assert not out.exists()


def test_a_context_beyond_the_trained_one_is_a_warning(standin, hwkv, mini_hybrid, tmp_path):
    out = tmp_path / "run.jsonl"
    code, _, err = bench(hwkv, "memory", mini_hybrid, "--arms", "full", "-c", 8192, "-r", 1, "-o", out)
    assert code == 0
    assert err.startswith("warning: a context of 8192 is larger than the model was trained for (4096)")
    assert "qwen35.context_length=int:8192" in records.read(out)[0].arguments


def test_rows_of_another_build_are_not_taken_for_done(standin, hwkv, mini_hybrid, tmp_path):
    out = tmp_path / "run.jsonl"
    words = ["memory", mini_hybrid, "--arms", "full", "-c", 512, "-r", 1, "-o", out]
    assert bench(hwkv, *words)[0] == 0
    out.write_text(out.read_text().replace('"build_pair": "', '"build_pair": "0'))
    code, _, err = bench(hwkv, *words)
    assert code == 0 and len(records.read(out)) == 2
    assert "holds 1 rows of another build or machine" in err
