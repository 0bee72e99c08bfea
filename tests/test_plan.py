"""hwkv plan: the bytes of models that fit here and of models that do not, and the largest context that fits."""

import importlib.util
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from minilang import needle_prompt

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.matrix import matrix
from hwkv_llamacpp.plan import dry_run
from hwkv_llamacpp.plan.planner import Header, Planner, excess, largest_context
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

ROOT = Path(__file__).parent.parent
GIB = 2**30
QWEN_POLICY = ROOT / "docs" / "accounting-windows.csv"


@pytest.fixture(scope="module")
def built():
    try:
        native.binary("llama-fit-params")
    except HwkvError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(GGUF with keys only, GGUF with tensors but no data) of Qwen3.6-27B's geometry."""
    spec = importlib.util.spec_from_file_location("geometry", ROOT / "bench" / "geometry.py")
    geometry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(geometry)
    folder = tmp_path_factory.mktemp("qwen")
    keys, tensors = folder / "keys.gguf", folder / "tensors.gguf"
    geometry.write(keys, with_tensors=False)
    geometry.write(tensors)
    assert tensors.stat().st_size > 15 * GIB and tensors.stat().st_blocks * 512 < 2**20
    return keys, tensors


def context(model, n_ctx, **more):
    return dry_run.Context(str(model), n_ctx=n_ctx, **more)


# geometry that does not fit this machine


def test_qwen_from_its_keys_alone(qwen):
    planner = Planner(qwen[0], dry=False)
    assert planner.geometry.kv_bytes_per_token == 64 * 1024
    plan = planner.plan(context(qwen[0], 114688))
    assert plan.kv_bytes == 7 * GIB
    assert "weights" in plan.unknown and "compute" in plan.unknown  # nothing there to count
    # 48 delta nets: conv state 3 x (6144 + 2 x 16 x 128), state 128 x 6144, in F32
    assert plan.parts()["recurrent"] == 48 * 4 * (3 * (6144 + 4096) + 128 * 6144)


def test_the_papers_accounting(qwen):
    """7.0 GiB of full KV at 112K; retention 68.95 % saves 2.17 GiB, 8.59 % of a peak of 25.3 GiB."""
    geometry = ModelGeometry.from_gguf(qwen[0])
    policy = matrix(geometry, QWEN_POLICY)
    retention = policy.retention(114688, geometry)
    assert f"{retention:.2%}" == "68.95%"
    saved = (1 - retention) * 7 * GIB
    assert f"{saved / GIB:.2f}" == "2.17" and f"{saved / (25.3 * GIB):.2%}" == "8.59%"
    plan = Planner(qwen[0], dry=False).plan(context(qwen[0], 114688), policy)
    # rings of 1024 + 512 and 8192 + 512 cells, 1 KiB for each KV head and cell
    assert plan.kv_bytes == (43 * 114688 + 6 * 1536 + 15 * 8704) * 1024
    assert plan.kv_bytes - retention * 7 * GIB == (6 + 15) * 512 * 1024  # the room for a micro-batch


def test_the_dry_run_agrees_with_the_formulas(built, qwen):
    keys, tensors = (Planner(path) for path in qwen)
    assert not keys.dry and tensors.dry
    exact, formula = tensors.plan(context(qwen[1], 114688)), keys.plan(context(qwen[1], 114688))
    assert exact.kv_bytes == formula.kv_bytes == exact.parts()["KV"]
    assert exact.parts()["recurrent"] == pytest.approx(formula.parts()["recurrent"], abs=6000 * 48)
    assert exact.parts()["weights"] == pytest.approx(tensors.header.weight_bytes, abs=2 * 2**20)
    assert 100 * 2**20 < exact.parts()["compute"] < GIB and exact.unknown == ()
    # at a window's cells the policy's dry run agrees, too, or plan() would have raised
    policy = matrix(tensors.geometry, QWEN_POLICY)
    path = qwen[0].parent / "policy.json"
    policy.save(path)
    assert tensors.plan(context(qwen[1], 114688, policy=str(path)), policy).kv_bytes < 0.7 * exact.kv_bytes


def test_a_file_that_ends_with_its_header_is_planned_like_the_whole(built, mini_hybrid, tmp_path):
    from hwkv_llamacpp.gguf.file import GGUFFile

    with GGUFFile(mini_hybrid) as file:
        header = tmp_path / "header.gguf"
        header.write_bytes(mini_hybrid.read_bytes()[: file.data_start])
    whole, alone = (Planner(path).plan(context(path, 4096)).parts() for path in (mini_hybrid, header))
    assert {**whole, "process": 0} == {**alone, "process": 0}


def test_kv_heads_listed_per_layer_starting_with_none(metadata_gguf):
    """LFM2-1.2B: 6 of 16 layers have attention."""
    heads = [8 if il in (2, 5, 8, 10, 12, 14) else 0 for il in range(16)]
    path = metadata_gguf(
        "lfm2",
        {
            "attention.head_count_kv": heads,
            "attention.head_count": 32,
            "embedding_length": 2048,
            "block_count": 16,
            "shortconv.l_cache": 3,
            "vocab_size": 65536,
        },
    )
    planner = Planner(path)
    assert [layer.layer for layer in planner.geometry.configurable] == [2, 5, 8, 10, 12, 14]
    plan = planner.plan(context(path, 32768))
    assert plan.kv_bytes == 384 * 2**20
    assert plan.parts()["recurrent"] == 10 * 2048 * 2 * 4


def test_mixture_of_experts_hybrid(metadata_gguf):
    """Qwen3.6-35B-A3B: 40 blocks, every 4th with full attention, 2 KV heads of 256."""
    path = metadata_gguf(
        "qwen35moe",
        {
            "block_count": 40,
            "attention.head_count": 16,
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "embedding_length": 2048,
            "full_attention_interval": 4,
            "vocab_size": 248320,
        },
    )
    assert Planner(path).geometry.kv_bytes_per_token == 20480


def test_granite_hybrid(metadata_gguf):
    heads = [4 if il == 5 else 0 for il in range(10)]
    path = metadata_gguf(
        "granitehybrid",
        {
            "block_count": 10,
            "attention.head_count": 12,
            "attention.head_count_kv": heads,
            "embedding_length": 1536,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 3072,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.time_step_rank": 48,
            "vocab_size": 100352,
        },
    )
    plan = Planner(path).plan(context(path, 8192, n_parallel=2))
    assert plan.kv_bytes == 8192 * 4 * 256 * 2
    assert plan.parts()["recurrent"] == 9 * 2 * 4 * (3 * (3072 + 2 * 128) + 128 * 3072)


# models that are here


@pytest.mark.parametrize(
    "more",
    [{}, {"n_parallel": 3}, {"n_parallel": 2, "kv_unified": True}, {"n_ubatch": 128, "type_k": "q8_0"}, {"n_ctx": 300}],
)
@pytest.mark.parametrize("name", ["mini_hybrid", "gemma3"])
def test_formulas_of_caches_and_states_are_the_runtimes(built, request, name, more):
    """plan() compares the caches of the dry run with the formulas, and raises where they differ."""
    model = request.getfixturevalue(name)
    planner = Planner(model)
    here = context(model, **{"n_ctx": 4096, **more})
    plan = planner.plan(here)
    recurrent = Header(model).recurrent_bytes(planner.geometry, here.n_parallel)
    assert plan.parts().get("recurrent", 0) == pytest.approx(recurrent, abs=6000)


@pytest.mark.parametrize(
    "name, own_mib, more",
    [
        ("gemma3", 26.25, {"n_ctx": 3900, "n_parallel": 2, "kv_unified": True}),
        ("gemma3", 168.75, {"n_ctx": 18432, "n_parallel": 9}),
        ("gemma3", 37.5, {"n_ctx": 3900, "n_parallel": 4, "kv_unified": True, "n_ubatch": 128}),
        ("gemma3", 7.96875, {"n_ctx": 3900, "n_ubatch": 512, "type_k": "q8_0", "type_v": "q8_0"}),
        ("smollm2", 0, {"n_ctx": 1000, "n_parallel": 3, "n_ubatch": 64}),
        ("smollm2", 0, {"n_ctx": 3900, "n_parallel": 9, "kv_unified": True, "type_k": "q8_0", "type_v": "q8_0"}),
    ],
)
def test_plan_dry_run_formulas_and_a_real_server_agree(built, request, tmp_path, name, own_mib, more):
    """The grid in test_footprint compares every cache with the runtime's; this is the way through all programs."""
    model = request.getfixturevalue(name)
    policy = Policy({5: [100], 11: [700]} if name == "gemma3" else {0: [64, None, 100], 7: [300, 300, 16]})
    path = tmp_path / "p.json"
    policy.save(path)
    here = context(model, policy=str(path), n_gpu_layers=0, **{"n_ctx": 0, **more})
    plan = Planner(model).plan(here, policy)  # raises where the dry run's caches are others
    formulas = Planner(model, dry=False).plan(here, policy)
    for each in (plan, formulas):
        assert each.parts().get("own windows", 0) == own_mib * 2**20
    assert plan.kv_bytes == formulas.kv_bytes == plan.parts()["KV"] == formulas.parts()["KV"]
    options = {key: value for key, value in vars(here).items() if key not in ("model", "policy")}
    with LlamaServer(ServerOptions(model, path, n_threads=1, **options)) as server:
        props, log = server.props()["hwkv"], server.log()
    assert props["kv_bytes"] == plan.kv_bytes and props["full_kv_bytes"] == plan.footprint.full_kv_bytes
    assert [(group["window"], group["cells"], group["bytes"]) for group in props["groups"]] == [
        (group.window, group.cells, group.bytes) for group in plan.footprint.groups
    ]
    own = plan.footprint.own_windows
    found = re.findall(r"(\d+) \| +([\d.]+) \(the model's own sliding window\)", log)
    assert found == ([(str(own.cells), f"{own_mib:.2f}")] if own else [])


def test_groups_have_devices(built, mini_hybrid):
    plan = Planner(mini_hybrid).plan(context(mini_hybrid, 4096))
    assert plan.group_devices == ({"CPU": plan.kv_bytes},)
    assert plan.to_dict()["groups"][0]["devices"] == {"CPU": plan.kv_bytes}


# the largest context


class Line:
    """A plan of n bytes for each token, and 1000 for a ring that is full at 5000 tokens."""

    def __init__(self, n):
        self.devices = {"host": {"KV": 7 * n + min(n, 5000) * 1000, "weights": 10**6}}


@pytest.mark.parametrize("limit", [10**6 + 256 * 1007, 3 * 10**6, 6 * 10**6, 6_035_000, 6_035_001, 6_100_000, 10**8])
def test_the_largest_context_fits_and_the_next_does_not(limit):
    tried = []

    def plan_at(n):
        tried.append(n)
        return Line(n)

    n, plan = largest_context(plan_at, [limit], 256, 2**30)
    assert excess(Line(n), [limit]) <= 0 < excess(Line(n + 256), [limit]) and plan.devices == Line(n).devices
    assert len(tried) < 40


def test_the_largest_context_at_its_ends():
    assert largest_context(Line, [10**6], 256, 2**20) is None
    assert largest_context(Line, [10**12], 256, 2**20)[0] == 2**20
    assert largest_context(Line, [10**12], 256, 128)[0] == 256  # never less than a step


def test_limits_are_those_of_the_devices_that_fill_up():
    class Gpu:
        devices = {"host": {"output": 500}, "CUDA0": {"KV": 100}, "CUDA1": {"KV": 300}}

    assert excess(Gpu, [250]) == 50
    assert excess(Gpu, [90, 300]) == 10
    with pytest.raises(HwkvError, match="--memory gives 3 sizes, the server would use 2 devices: CUDA0, CUDA1"):
        excess(Gpu, [1, 2, 3])


# the command


def test_the_command_on_a_model_that_is_here(built, hwkv, mini_hybrid, tmp_path):
    policy = tmp_path / "p.json"
    policy.write_text(Policy({3: (None, 64, 64, 64)}).to_json())
    code, out, err = hwkv("plan", mini_hybrid, "--policy", policy, "-c", 4096, "--memory", "55MiB", "--json")
    assert code == 0, err
    answer = json.loads(out)
    full, ours = answer["plans"]["full KV"], answer["plans"]["policy"]
    assert full["kv_bytes"] == ours["full_kv_bytes"] == 8 * 2**20
    assert [group["window"] for group in ours["groups"]] == [None, 64]
    assert ours["checkpoint_bytes"] > full["checkpoint_bytes"] > 0
    assert [(x["n_parallel"], x["plan"]) for x in answer["largest"]] == [(1, "full KV"), (1, "policy")]
    assert 0 < answer["largest"][0]["n_ctx"] < answer["largest"][1]["n_ctx"]
    code, out, _ = hwkv("plan", mini_hybrid, "--policy", policy, "-c", 4096, "-np", 2, "--memory", "1TiB")
    assert "-c 4096, 2 slots of 2048, MiB" in out and "total, all slots" in out and "contexts of several slots" in out
    assert "KV, window 64, 3 KV heads, 768 cells x 2 slots" in out and "context checkpoints, up to 32 per slot" in out
    assert "a third more of both" in out
    assert "8,192 *   8,192 *   1.000" in out and "all that the model was trained for" in out


def test_the_command_without_a_build(hwkv, qwen):
    code, out, err = hwkv("plan", qwen[0], "-c", 114688)
    assert code == 0
    assert "no dry run (the file has no tensors); every number is a formula" in err
    assert (
        "7,168.00" in out
        and "not in the total, because only a dry run can tell: weights, compute, output, process" in out
    )


def test_without_a_dry_run_the_largest_context_is_an_upper_bound(hwkv, mini_hybrid):
    out = hwkv("plan", mini_hybrid, "--formulas", "--memory", "9MiB")[1]
    assert (
        "context in 9 MiB, at most" in " ".join(out.split())
        and "at most: compute, output, process take memory, too" in out
    )
    assert ", 1 slot, MiB" in out


def test_offloading_on_a_build_without_a_gpu_is_a_warning(built, hwkv, mini_hybrid):
    if native.has_gpu():
        pytest.skip("the build in use has a GPU backend")
    code, _, err = hwkv("plan", mini_hybrid, "-c", 4096, "--n-gpu-layers", 99, "--memory", "1GiB")
    assert code == 0 and "warning: -ngl 99: the build in use (cpu) has no GPU" in err
    assert "warning" not in hwkv("plan", mini_hybrid, "-c", 4096, "-ngl", 0)[2]


def test_a_draft_model_is_part_of_the_total(built, hwkv, mini_hybrid):
    code, out, _ = hwkv("plan", mini_hybrid, "-c", 4096, "--json")
    alone = json.loads(out)["plans"]["full KV"]
    code, out, _ = hwkv("plan", mini_hybrid, "-c", 4096, "-md", mini_hybrid, "--json")
    both = json.loads(out)["plans"]["full KV"]
    draft = sum(n_bytes for part, n_bytes in alone["parts"].items() if part != "process")
    assert both["devices"]["host"]["draft model"] == both["parts"]["draft model"] == draft > alone["kv_bytes"]
    assert sum(both["parts"].values()) == both["total_bytes"]
    assert both["total_bytes"] - draft == pytest.approx(alone["total_bytes"], abs=2**20)


def test_a_context_that_no_machine_holds_is_planned_by_formulas_at_once(built, hwkv, mini_hybrid):
    """2,048 bytes of F16 a token. llama.cpp alone would first make the bookkeeping of all cells."""
    start = time.monotonic()
    code, out, err = hwkv("plan", mini_hybrid, "-c", 2_000_000_000)
    assert code == 0 and f"{2_000_000_000 / 512:,.2f}" in out
    assert "no dry run (a context of 2,000,000,000 tokens, at most 33,554,432 expected); every number is" in err
    host = f"{psutil.virtual_memory().total / GIB:,.1f} GiB of memory"
    assert f"warning: -c 2000000000 takes at least 3,814.7 GiB of KV, this machine has {host}" in err
    assert time.monotonic() - start < 20
    assert "warning: -c" not in hwkv("plan", mini_hybrid, "-c", 2_000_000_000, "--memory", "5TiB")[2]
    assert "warning: -c" not in hwkv("plan", mini_hybrid, "-c", 4096, "--formulas")[2]


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["MODEL", "--memory", "0"], 2, "'0' is 0 bytes: a size with its unit expected, such as 24GiB"),
        (["MODEL", "-c", "many"], 2, "'many' is not a number from 1 to 2147483647"),
        (["no.gguf"], 1, "no.gguf: cannot read: No such file or directory"),
        (["MODEL", "--policy", "no.json"], 1, "no.json: cannot read: No such file or directory"),
        (["MODEL", "-ctk", "q8_1"], 2, "invalid choice: 'q8_1'"),
    ],
)
def test_bad_input_is_one_sentence(hwkv, mini_hybrid, words, code, message):
    got, _, err = hwkv("plan", *[mini_hybrid if word == "MODEL" else word for word in words])
    assert got == code and message in err.splitlines()[-1]


# what fills as requests come


def test_edited_chats_stay_within_the_lines_for_checkpoints_and_prompts(built, mini_hybrid, tmp_path):
    """40 chats that grow and are edited, on four slots: every slot has all its checkpoints and the cache of prompts is
    full.

    A larger model's are each mapped by themselves; those of this one would lie in glibc's heap, whose gaps take up to a
    third more.
    """
    n_checkpoints, n_cache = 3, 24 * 2**20
    path, rows = tmp_path / "p.json", {3: (None, 512, 512, 512), 7: (512, None, 512, 512)}
    Policy(rows).save(path)
    options = ServerOptions(
        mini_hybrid,
        path,
        n_ctx=4096,
        n_batch=256,
        n_ubatch=128,
        n_parallel=4,
        n_threads=1,
        n_gpu_layers=0,
        flash_attn="on",
        extra=(
            "--ctx-checkpoints",
            str(n_checkpoints),
            "--checkpoint-min-step",
            "64",
            "--cache-ram",
            str(n_cache >> 20),
            "-lv",
            "4",
        ),
        environment={"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    plan = Planner(mini_hybrid).plan(
        context(mini_hybrid, 4096, policy=str(path), n_batch=256, n_ubatch=128, n_parallel=4, n_gpu_layers=0),
        Policy(rows),
    )
    with LlamaServer(options) as server:

        def chat(i):
            text = needle_prompt(i, 600, 300)[0]
            for prompt in (text[:700], text[:1100], text[:1500], text, text + text[:400], text[:1200] + text[1400:]):
                assert server.post("/completion", {"prompt": prompt, "n_predict": 4})["tokens_predicted"] == 4

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(chat, range(40)))
        peak, log = server.memory()["rss_peak_bytes"], server.log()
    made, dropped = log.count("created context checkpoint"), log.count("erasing old context checkpoint")
    states = [(int(n), float(mib) * 2**20) for n, mib in re.findall(r"cache state: (\d+) prompts, ([\d.]+) MiB", log)]
    fullest = max(n_bytes for _, n_bytes in states)
    one_prompt = max(n_bytes / n for n, n_bytes in states if n)  # is there before the oldest goes
    most = plan.total_bytes + 4 * n_checkpoints * plan.checkpoint_bytes + n_cache + one_prompt
    print(
        f"peak {peak / 2**20:.1f} of {most / 2**20:.1f} MiB, {plan.total_bytes / 2**20:.1f} at the start;"
        f" {made} checkpoints made, {dropped} dropped; cache of prompts up to {fullest / 2**20:.1f} MiB"
    )
    assert 0.9 * n_cache < fullest <= n_cache
    assert made > 4 * n_checkpoints and dropped > 0
    assert peak <= 1.02 * most
