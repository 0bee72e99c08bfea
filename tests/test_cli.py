"""The hwkv command: a table of command lines and what each must say."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from hwkv_llamacpp import Policy
from hwkv_llamacpp.gguf.embed import read_policy
from hwkv_llamacpp.runtime import native

COMMANDS = [
    ("info",),
    ("policy",),
    ("policy", "make"),
    ("policy", "make", "uniform"),
    ("policy", "make", "matrix"),
    ("policy", "make", "streaming"),
    ("policy", "make", "random"),
    ("policy", "make", "pattern"),
    ("policy", "show"),
    ("policy", "check"),
    ("embed",),
    ("extract",),
    ("serve",),
    ("demo",),
]


@pytest.fixture
def model(metadata_gguf):
    """4 layers of 2 KV heads: 0 and 2 take windows, 1 and 3 slide."""
    return metadata_gguf(
        "maple",
        {
            "attention.head_count_kv": 2,
            "attention.sliding_window": 128,
            "attention.sliding_window_pattern": [0, 1, 0, 1],
            "general.name": "four layers",
        },
    )


@pytest.fixture
def saved(hwkv, model, tmp_path):
    path = tmp_path / "p.json"
    assert hwkv("policy", "make", "uniform", model, "--window", 512, "--keep-full", "0:1", "-o", path) == (
        0,
        f"wrote {path}\nit keeps 26.2% of the KV cells at 32,768 tokens, the trained context\n",
        "",
    )
    return path


# help


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_help(hwkv, command):
    code, out, err = hwkv(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: hwkv {' '.join(command)}".rstrip())
    if command:
        assert re.search(r"example:\n  hwkv " + " ".join(command), out)


def test_every_command_is_listed(hwkv):
    out = hwkv("--help")[1]
    assert [
        name for name in ("info", "policy", "embed", "extract", "serve", "demo") if f"\n    {name} " not in out
    ] == []


# the whole way


def test_from_a_model_to_a_model_with_a_policy(hwkv, mini_hybrid, tmp_path):
    policy, out, again, picture = (tmp_path / name for name in ("p.json", "out.gguf", "again.json", "p.png"))
    assert (
        hwkv(
            "policy",
            "make",
            "pattern",
            mini_hybrid,
            "--pattern",
            "full,512,512,full",
            "--layer",
            "3:full,64,64,64",
            "-o",
            policy,
        )[0]
        == 0
    )
    assert Policy.load(policy).layers == {3: (None, 64, 64, 64), 7: (None, 512, 512, None)}
    code, text, err = hwkv("policy", "check", mini_hybrid, policy, "-c", 4096)
    assert (code, err) == (0, "")
    assert "5 of 8 KV heads in 2 layers windowed" in text
    assert hwkv("embed", mini_hybrid, policy, "-o", out) == (0, f"wrote {out}\n", "")
    assert hwkv("extract", out) == (0, policy.read_text(), "")
    assert hwkv("extract", out, "-o", again) == (0, f"wrote {again}\n", "")
    assert again.read_bytes() == policy.read_bytes()
    assert hwkv("policy", "check", mini_hybrid, out)[0] == 0
    assert hwkv("embed", mini_hybrid, out, "-o", tmp_path / "twin.gguf")[0] == 0
    assert (tmp_path / "twin.gguf").read_bytes() == out.read_bytes()
    code, text, _ = hwkv("policy", "show", policy, "-m", mini_hybrid, "--plot", picture)
    assert code == 0 and picture.exists()
    assert re.search(r"^ +3 +full +64 +64 +64", text, re.MULTILINE)


def test_baselines(hwkv, model):
    def made(*words):
        code, out, err = hwkv("policy", "make", words[0], model, *words[1:])
        assert (code, err) == (0, "")
        return Policy.from_json(out)

    assert made("streaming", "--window", 1020) == made("streaming", "--window", 1020, "--sink", 4)
    assert made("streaming", "--retention", 0.25, "-c", 4096).layers == made("streaming", "--window", 1020).layers
    # 512 bytes a cell: 4 MiB for the full head, and three times 1280 cells for a window of 768 and the micro-batch
    policy = made("uniform", "--budget-bytes", "6MiB", "-c", 8192, "--keep-full", "0:1")
    assert policy.layers == {0: (768, None), 2: (768, 768)} and policy.n_sink == 0
    assert made("uniform", "--window", 64, "--sink", 2).n_sink == 2
    assert made("uniform", "--retention", 0.5).layers[0] == (16384, 16384)  # of the trained context
    policy = made("random", "--windows", "256,1024,full", "--retention", 0.5, "-c", 8192, "--seed", 3, "--sink", 4)
    assert 0.3 < policy.retention(8192) <= 0.5
    assert policy.provenance == {
        "method": "random",
        "windows": "256,1024,full",
        "seed": 3,
        "retention": 0.5,
        "n_ctx": 8192,
        "made_by": "hand",
    }
    assert made("random", "--windows", "256,1024,full") == made("random", "--windows", "256,1024,full", "--seed", 0)


# machine-readable output


def test_info_json(hwkv, model, mini_hybrid, tmp_path):
    code, out, err = hwkv("info", model, "--json")
    assert (code, err) == (0, "")
    info = json.loads(out)
    assert {key: info[key] for key in info if key != "fingerprint"} == {
        "architecture": "maple",
        "name": "four layers",
        "n_layer": 4,
        "n_ctx_train": 32768,
        "configurable_layers": [
            {"layer": il, "n_head": 8, "n_head_kv": 2, "head_dim_k": 128, "head_dim_v": 128} for il in (0, 2)
        ],
        "other_layers": [{"layer": 1, "kind": "swa"}, {"layer": 3, "kind": "swa"}],
        "kv_bytes_per_token": 2 * 2 * 256 * 2,
        "refusal": None,
        "policy": None,
    }
    out = tmp_path / "out.gguf"
    policy = tmp_path / "p.json"
    Policy({7: [1, 1, 1, 1]}).save(policy)
    assert json.loads(hwkv("embed", mini_hybrid, policy, "-o", out, "--json")[1]) == {"written": [str(out)]}
    assert json.loads(hwkv("info", out, "--json")[1])["policy"] == read_summary(out)


def read_summary(path):
    from hwkv_llamacpp import ModelGeometry

    return read_policy(path).summary(ModelGeometry.from_gguf(path))


def test_check_json(hwkv, model, saved):
    check = json.loads(hwkv("policy", "check", model, saved, "-c", 8192, "--json")[1])
    assert check["fits"] and check["active"] and check["n_ctx"] == 8192
    assert check["retention"] == pytest.approx((8192 + 3 * 512) / (4 * 8192))
    assert check["full_kv_bytes"] == 8192 * 2 * 2 * 256 * 2
    assert [group["window"] for group in check["groups"]] == [None, 512]


def test_show_json(hwkv, saved):
    show = json.loads(hwkv("policy", "show", saved, "--json")[1])
    assert show["layers"] == [{"layer": 0, "windows": [512, "full"]}, {"layer": 2, "windows": [512, 512]}]
    assert show["retention"]["2048"] == pytest.approx((2048 + 3 * 512) / (4 * 2048))
    assert show["provenance"]["method"] == "uniform"


# tables


def test_info_tables(hwkv, gemma3, metadata_gguf):
    out = hwkv("info", gemma3)[1]
    assert re.search(r"layers +18, 3 take windows", out)
    assert re.search(r"5, 11, 17 +attention +4 +1 +256, 256 +takes windows", out)
    assert re.search(r"0-4, 6-10, 12-16 +swa +4 +1 +256, 256 +has the model's own sliding window of 512 tokens", out)
    out = hwkv("info", metadata_gguf("bloom"))[1]
    assert "no policy fits this model: its ALiBi slopes follow the head's index, which grouped attention changes" in out
    assert hwkv("info", metadata_gguf("clip"))[0] == 0


def test_square_brackets_are_not_markup(hwkv, metadata_gguf):
    assert "[red]model[/red]" in hwkv("info", metadata_gguf("llama", {"general.name": "[red]model[/red]"}))[1]


def test_show_says_how_it_was_made(hwkv, tmp_path, model):
    def made_by(*words):
        lines = hwkv("policy", "show", *words)[1].splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("made by"))
        return [line[8:].strip() for line in lines[at : at + 3]]

    policy = tmp_path / "p.json"
    hwkv("policy", "make", "uniform", model, "--retention", 0.25, "-c", 4096, "--sink", 4, "-o", policy)
    assert made_by(policy)[0] == "uniform, window 1020, a budget of 0.25 (share of the cells at 4096 tokens)"
    Policy(
        {0: [64, 64]},
        provenance={
            "method": "seqcalib",
            "n_ctx": 1024,
            "windows": [256, 512],
            "seed": 0,
            "tau": 0.98,
            "trace": {"text": "default", "seed": 0},
            "trace_sha256": "8fe7",
            "numpy": "2.4.6",
        },
    ).save(policy)
    assert made_by(policy) == [
        "seqcalib, tau 0.98, seed 0",
        "from windows of 256, 512 tokens",
        "on traces of 1024 tokens of the text that ships",
    ]
    for provenance in ({"method": None, "trace": {}, "windows": 3}, {"budget": [], "tau": {}}, {"x": 1}):
        Policy({0: [64, 64]}, provenance=provenance).save(policy)
        assert hwkv("policy", "show", policy)[0] == 0


def test_a_context_beyond_the_trained_one_is_a_warning(hwkv, model, saved, tmp_path):
    warning = (
        "warning: the context of 65536 tokens is larger than the model was trained for (32768): llama-server would cap"
        " its slots\n"
    )
    assert hwkv("policy", "check", model, saved, "-c", 65536)[::2] == (0, warning)
    assert hwkv("policy", "make", "uniform", model, "--retention", 0.5, "-c", 65536)[::2] == (0, warning)
    assert hwkv("policy", "check", model, saved, "-c", 32768)[2] == ""


def test_a_policy_from_a_pipe(hwkv, model, saved, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(saved.read_bytes()), daemon=True)
    writer.start()
    assert hwkv("policy", "check", model, pipe)[::2] == (0, "")
    writer.join(10)


# errors: command line, exit code, what stderr says. M is the model, P its policy, D a folder.

FAILURES = [
    ("info", 2, "the following arguments are required: MODEL"),
    ("nonsense", 2, "invalid choice: 'nonsense'"),
    ("", 2, "the following arguments are required: COMMAND"),
    ("info D/none", 1, "error: D/none: cannot read: No such file or directory"),
    ("info P", 1, "error: P: not a GGUF file: it starts with b'{\\n  ', not b'GGUF'"),
    ("info D", 1, "error: D: cannot read: Is a directory"),
    ("policy make uniform M", 2, "one of the arguments --window --retention --budget-bytes is required"),
    ("policy make uniform M --window 0", 2, "argument --window: '0' is not a number of tokens from 1 to 2147483647"),
    ("policy make uniform M --window -5", 2, "argument --window: '-5' is not a number of tokens"),
    (
        "policy make uniform M --window 1.5",
        2,
        "argument --window: '1.5' is not a number of tokens from 1 to 2147483647",
    ),
    ("policy make uniform M --window 99999999999", 2, "'99999999999' is not a number of tokens from 1 to 2147483647"),
    (
        "policy make uniform M --window full",
        2,
        "argument --window: 'full' is not a number of tokens from 1 to 2147483647",
    ),
    (
        "policy make uniform M --window 9 --keep-full x",
        2,
        "argument --keep-full: 'x' is not a number of a layer or KV head",
    ),
    (
        "policy make uniform M --window 9 --keep-full 0:",
        2,
        "argument --keep-full: '' is not a number of a layer or KV head",
    ),
    (
        "policy make uniform M --window 9 --keep-full 1",
        1,
        "error: layer 1 cannot be kept full: it has the model's own sliding window of 128 tokens",
    ),
    (
        "policy make uniform M --window 9 --keep-full 0:2",
        1,
        "error: KV head 2 of layer 0 cannot be kept full: the layer has KV heads 0 to 1",
    ),
    ("policy make uniform M --window 9 -o P", 1, "error: P: exists already; --force replaces it"),
    ("policy make uniform M --window 9 -o D", 1, "error: D: cannot write: it is a folder"),
    ("policy make uniform M --window 9 -o P/below", 1, "error: P/below: cannot write: Not a directory"),
    ("policy make uniform M --window 9 --retention 0.5", 2, "argument --retention: not allowed with argument --window"),
    (
        "policy make uniform M --window 9 -c 4096",
        1,
        "error: -c is the context of --retention or --budget-bytes; neither is given",
    ),
    (
        "policy make uniform M --retention 1.5",
        1,
        "error: a budget has a retention of 1.5, above 0 and at most 1 expected",
    ),
    ("policy make uniform M --retention x", 2, "argument --retention: invalid float value: 'x'"),
    (
        "policy make uniform M --budget-bytes 4XB",
        2,
        "argument --budget-bytes: '4XB' is not a size such as 24GiB, 24GB or 300MiB",
    ),
    (
        "policy make uniform M --retention 0.1 -c 5",
        1,
        "error: no window fits: 1 token per KV head is a retention of 0.2 at 5 tokens, at most 0.1 expected",
    ),
    (
        "policy make streaming M --window 9 --sink -1",
        2,
        "argument --sink: '-1' is not a number of tokens from 0 to 2147483647",
    ),
    ("policy make random M", 2, "the following arguments are required: --windows"),
    ("policy make random M --windows 9,x", 2, 'argument --windows: "x" is neither "full" nor a number of tokens'),
    ("policy make random M --windows 9,full --seed x", 2, "argument --seed: 'x' is not a seed from 0 to 2147483647"),
    (
        "policy make random M --windows 0,full",
        1,
        'error: policy: window 0 of layer 0 is 0, "full" or 1 to 2147483647 tokens expected',
    ),
    (
        "policy make random M --windows 9,full --retention 0.5 --budget-bytes 1GiB",
        2,
        "not allowed with argument --retention",
    ),
    ("policy make matrix M", 2, "the following arguments are required: --matrix"),
    ("policy make matrix M --matrix D/none.csv", 1, "error: D/none.csv: cannot read: No such file or directory"),
    ("policy make matrix M --matrix D", 1, "error: D: cannot read: Is a directory"),
    (
        "policy make matrix M --matrix D/long.csv",
        1,
        "error: D/long.csv: line 1: field larger than field limit (131072)",
    ),
    ("demo -c 512", 2, "argument -c/--ctx-size: '512' is not a number of tokens from 1024 to 8192"),
    ("demo --output P/below", 1, "error: P/below: Not a directory"),
    ("report D/none -o P", 1, "error: D/none: cannot read: no such file"),
    ("policy make pattern M", 1, "error: a pattern needs --pattern or --layer"),
    ("policy make pattern M --pattern full,x", 2, 'argument --pattern: "x" is neither "full" nor a number of tokens'),
    (
        "policy make pattern M --pattern full",
        1,
        "error: pattern: layer 0 gets 1 windows, the model has 2 KV heads there",
    ),
    (
        "policy make pattern M --pattern 0,1",
        1,
        'error: policy: window 0 of layer 0 is 0, "full" or 1 to 2147483647 tokens expected',
    ),
    ("policy make pattern M --layer 0", 2, "argument --layer: '0' is not LAYER:ROW, as in 3:full,64,64,64"),
    ("policy make pattern M --layer 0:1,1 --layer 0:2,2", 1, "error: --layer names a layer twice"),
    (
        "policy make pattern M --layer 1:1,1",
        1,
        "error: pattern: layer 1 cannot take windows: it has the model's own sliding window of 128 tokens",
    ),
    ("policy show D/none", 1, "error: D/none: cannot read: No such file or directory"),
    ("policy show M", 1, "error: M: has no embedded policy"),
    ("policy show P --plot D/p.gif", 1, "error: D/p.gif: a name that ends in .png, .svg or .pdf expected"),
    ("policy check M", 2, "the following arguments are required: POLICY"),
    ("policy check M P -c x", 2, "argument -c/--ctx-size: 'x' is not a number of tokens from 1 to 2147483647"),
    ("policy check P M", 1, "error: P: not a GGUF file, but M is one: MODEL comes first, then POLICY"),
    ("embed P M -o D/out", 1, "error: P: not a GGUF file, but M is one: MODEL comes first, then POLICY"),
    (
        "policy check H P",
        1,
        'error: P: made for another model: key \'model.architecture\' is "maple", "qwen35" expected',
    ),
    ("embed M P", 2, "the following arguments are required: -o/--output"),
    ("embed M P -o M --force", 1, "error: M: is the input; embedding writes a new file"),
    ("embed M P -o P", 1, "error: P: exists already; --force replaces it"),
    ("embed H P -o D/out", 1, "error: P: made for another model"),
    ("embed M M -o D/out", 1, "error: M: has no embedded policy"),
    ("extract M", 1, "error: M: has no embedded policy"),
    ("extract P", 1, "error: P: not a GGUF file"),
]


@pytest.mark.parametrize(("line", "code", "message"), FAILURES, ids=[line for line, _, _ in FAILURES])
def test_failures(hwkv, model, saved, mini_hybrid, tmp_path, line, code, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "long.csv").write_text("9" * 200_000)
    names = {"M": str(model), "P": str(saved), "H": str(mini_hybrid), "D": str(folder)}
    before = sorted(tmp_path.rglob("*"))
    words = [re.sub(r"^[MPHD](?=/|$)", lambda found: names[found[0]], word) for word in line.split()]
    actual_code, out, err = hwkv(*words)
    for letter, path in sorted(names.items(), key=lambda item: -len(item[1])):
        err = err.replace(path, letter)
    assert (actual_code, out) == (code, "")
    assert message in err
    assert "Traceback" not in err and err.count("\n") == (1 if code == 1 else err.count("\n"))
    assert sorted(tmp_path.rglob("*")) == before


def test_sinks_count_as_kept_cells(hwkv, model, tmp_path):
    cells = {}
    for n_sink in (0, 400):
        Policy({0: [1, 1]}, n_sink=n_sink).save(tmp_path / "p.json")
        code, out, _ = hwkv("policy", "check", model, tmp_path / "p.json", "-c", 4096, "--json")
        assert code == 0
        cells[n_sink] = json.loads(out)["groups"][1]["cells"]
    assert cells == {0: 768, 400: 1024}


# as a process


def test_names_that_are_no_text(hwkv_process, mini_hybrid, tmp_path):
    """On Linux a name may be any bytes."""
    model, text, policy, embedded, rows = (
        tmp_path / os.fsdecode(b"\xff" + name) for name in (b"m.gguf", b"t.txt", b"p.json", b"e.gguf", b"r.jsonl")
    )
    try:
        model.symlink_to(mini_hybrid)
    except OSError:
        pytest.skip("this file system takes text only")
    text.write_bytes((native.ROOT / "policies" / "mini-hybrid" / "trace.txt").read_bytes()[:30000])
    for words in (
        [
            "calibrate",
            model,
            "-o",
            policy,
            "--trace-tokens",
            512,
            "--windows",
            "64,128",
            "--queries",
            16,
            "--taus",
            0.95,
            "--text",
            text,
            "-t",
            1,
        ],
        ["info", model],
        ["policy", "show", policy],
        ["embed", model, policy, "-o", embedded],
        ["plan", model, "-c", 1024, "--policy", policy],
        [
            "bench",
            "memory",
            embedded,
            "--policy",
            policy,
            "--arms",
            "policy",
            "-c",
            512,
            "-r",
            1,
            "-n",
            4,
            "-t",
            1,
            "-o",
            rows,
        ],
        ["report", rows, "-o", tmp_path / os.fsdecode(b"\xff")],
    ):
        done = hwkv_process(*words, errors="replace")
        assert done.returncode == 0, (words, done.stderr)


def test_exit_codes_of_the_process(hwkv_process, mini_hybrid, tmp_path):
    assert hwkv_process("info", mini_hybrid).returncode == 0
    failed = hwkv_process("info", tmp_path / "none")
    assert (failed.returncode, failed.stdout, failed.stderr) == (
        1,
        "",
        f"error: {tmp_path}/none: cannot read: No such file or directory\n",
    )
    assert hwkv_process("info").returncode == 2
    assert hwkv_process("--version").stdout.startswith("hwkv ")


def test_output_into_a_closed_pipe(mini_hybrid):
    process = subprocess.Popen(
        [sys.executable, "-m", "hwkv_llamacpp", "info", str(mini_hybrid), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) in (0, 1)


def test_output_onto_a_full_disk(hwkv_process, mini_hybrid):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hwkv_llamacpp", "info", str(mini_hybrid)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot print: No space left on device\n")


def test_interrupt_while_waiting_for_input(tmp_path):
    """Ctrl-C ends with one sentence wherever it comes: here while a policy is read from a pipe that never ends."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "hwkv_llamacpp", "policy", "show", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with open(pipe, "wb"):  # blocks until the command has opened the other end
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"\ninterrupted; no file was left half written\n")


def test_importing_does_nothing():
    """No side effects, and nothing heavy: no build, no llama_cpp, no matplotlib."""
    script = (
        "import os, sys; before = dict(os.environ); import hwkv_llamacpp; assert dict(os.environ) == before"
        "; assert not {'llama_cpp', 'matplotlib', 'rich', 'requests'} & set(sys.modules), sys.modules.keys()"
        "; assert 'Llama' in dir(hwkv_llamacpp)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_as_a_module(mini_hybrid):
    done = subprocess.run(
        [sys.executable, "-m", "hwkv_llamacpp", "info", str(mini_hybrid), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["architecture"] == "qwen35"
