"""The real llama-server under a policy: whatever a client does to its prompt, the answer is a fresh server's."""

import dataclasses
import functools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from answers import ask, assert_same, difference, from_reply, is_same
from f32 import f32_copy
from minilang import needle_prompt

from hwkv_llamacpp import ModelGeometry
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.errors import HwkvError
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.gguf.embed import embed
from hwkv_llamacpp.measure.prompt import diary
from hwkv_llamacpp.runtime import native
from hwkv_llamacpp.runtime.server import LlamaServer, ServerOptions

MINI_HYBRID = Path(__file__).parent / "data" / "mini-hybrid-f16.gguf"
N_UBATCH = 128
NO_SLOT = re.compile(r"failed to find|retrying with smaller|no (free|memory) slot", re.IGNORECASE)

pytestmark = pytest.mark.timeout(1200)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a policy with several windows, all far shorter than the prompts, so that the rings turn over many
    times."""

    name: str
    rows: tuple  # windows per configurable layer, repeated
    n_prompt: int
    n_sink: int = 0

    @functools.cached_property
    def model(self):
        # F32 weights and F32 K/V: the least noise, so a small fault shows
        return {
            "smollm2": lambda: f32_copy(testmodels.smollm2()),
            "gemma3": lambda: f32_copy(testmodels.gemma3()),
            "mini-hybrid": lambda: MINI_HYBRID,
            "mini-hybrid, 4 sinks": lambda: MINI_HYBRID,
        }[self.name]()

    @functools.cached_property
    def text(self):
        if self.name.startswith("mini-hybrid"):
            return needle_prompt(7, self.n_prompt + 400, 900)[0]
        return diary(200)

    def policy(self):
        geometry = ModelGeometry.from_gguf(self.model)
        layers = [layer.layer for layer in geometry.configurable]
        policy = pattern(geometry, by_layer={il: list(self.rows[i % len(self.rows)]) for i, il in enumerate(layers)})
        return dataclasses.replace(policy, n_sink=self.n_sink)


CASES = {
    case.name: case
    for case in (
        Case("smollm2", ((None, 64, 100), (130, 64, 64), (64, 100, 64)), 700),
        Case("gemma3", ((64,), (None,), (200,)), 1100),
        Case("mini-hybrid", ((64, None, 200, 64), (100, 64, None, 64)), 1100),
        Case("mini-hybrid, 4 sinks", ((64, 200, 64, 64), (100, None, 64, 64)), 1100, n_sink=4),
    )
}


@pytest.fixture(scope="module", autouse=True)
def built():
    try:
        native.binary("llama-server")
        native.binary("llama-server", upstream=True)  # what every comparison is held against
    except HwkvError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def options(case, tmp_path):
    return server_options(case, tmp_path)


@pytest.fixture
def smollm2_options(tmp_path):
    return server_options(CASES["smollm2"], tmp_path)


def server_options(case, folder, **changes):
    path = folder / "policy.json"
    case.policy().save(path)
    base = ServerOptions(
        model=case.model,
        policy=path,
        n_ctx=2048,
        n_batch=N_UBATCH,
        n_ubatch=N_UBATCH,
        n_parallel=1,
        n_threads=2,
        flash_attn="on",
        type_k="f32",
        type_v="f32",
        # threads that sleep instead of spinning: a busy machine slows the tests, but does not stall them
        environment={"OMP_WAIT_POLICY": "passive"},
    )
    return dataclasses.replace(base, **changes)


def unpatched(options):
    return dataclasses.replace(options, policy=None, upstream=True)


FRESH = {}


def fresh(options, prompt):
    """The answer of a newly started server. Kept: several tests compare with the same one."""
    policy = Path(options.policy).read_text() if isinstance(options.policy, Path) else options.policy
    key = (repr(dataclasses.replace(options, policy=policy, slot_save_path=None)), tuple(prompt))
    if key not in FRESH:
        with LlamaServer(options) as server:
            FRESH[key] = ask(server, prompt)
    return FRESH[key]


@functools.cache
def tokens_of(name):
    """A long text of a case as token ids."""
    case = CASES[name]
    with LlamaServer(ServerOptions(model=case.model, n_ctx=256, n_parallel=1)) as server:
        return tuple(server.post("/tokenize", {"content": case.text, "add_special": True})["tokens"])


def chat(server, case):
    """[(what, prompt, answer)]: what a client may do to its prompt, asked of one server in this order."""
    tokens = list(tokens_of(case.name))
    n, early = case.n_prompt, case.n_prompt // 5
    base, short = tokens[:n], tokens[: n * 3 // 5]
    done = [("first prompt", base, ask(server, base))]

    def turn(what, prompt):
        done.append((what, prompt, ask(server, prompt)))

    def append(what, new):
        turn(what, done[-1][1] + done[-1][2].tokens + new)

    append("continue", tokens[n : n + 60])
    append("continue again", tokens[n + 60 : n + 150])
    turn("regenerate", done[-1][1])
    turn("other last message", base + tokens[n + 100 : n + 180])
    turn("edit an early message", base[:early] + tokens[n + 200 : n + 230] + base[early:])
    turn("shorten", short)
    append("continue the shortened", tokens[n + 30 : n + 90])
    turn("another chat", tokens[20 : 20 + n // 2])
    turn("back to the first", base)
    return done


@functools.cache
def batch_noise(name, folder):
    """What other batch splits do to this model: cached against fresh in the unpatched build, and one split against
    another under the policy's masks. Windows make some models more sensitive; the second is measured with rings as long
    as the context, and without any cached prompt, so that no fault of rings or reuse hides in it.
    """
    case = CASES[name]
    options = server_options(case, folder)
    with LlamaServer(unpatched(options)) as server:
        turns = chat(server, case)[1:6]
    noise = max(difference(answer, fresh(unpatched(options), prompt))[0] for _, prompt, answer in turns)
    masked_noise = max(prompt_noise(options, prompt) for _, prompt, _ in turns[:4])
    print(
        f"noise of batch splits, {name}: {noise:.4f} in the unpatched build, {masked_noise:.4f} under the policy's"
        " masks"
    )
    return max(noise, masked_noise)


def prompt_noise(options, prompt):
    """How far apart fresh answers to one prompt are for several batch splits, under the same masks with rings as long
    as the context: a ring has room for the windows of all slots that share it."""
    masked = dataclasses.replace(options, n_parallel=32, kv_unified=True)
    return max(
        difference(fresh(dataclasses.replace(masked, n_batch=n, n_ubatch=n), prompt), fresh(masked, prompt))[0]
        for n in (32, 96)
    )


def assert_like_fresh(options, answer, prompt, noise, what):
    """Fails where an answer differs from a fresh server's by more than the noise, or than this very prompt's own
    noise."""
    expected = fresh(options, prompt)
    if not is_same(answer, expected, noise):
        noise = max(noise, prompt_noise(options, prompt))  # some prompts stand on a knife's edge
    assert_same(answer, expected, noise, what)


@pytest.fixture(scope="module")
def noise(case, tmp_path_factory):
    return batch_noise(case.name, tmp_path_factory.mktemp("noise"))


def test_chat_steps_equal_a_fresh_server(case, options, noise):
    with LlamaServer(options) as server:
        assert server.props()["hwkv"]["active"]
        turns = chat(server, case)
        assert not NO_SLOT.search(server.log())
    for what, prompt, answer in turns:
        assert_like_fresh(options, answer, prompt, noise, what)
    # what the cache is for: a turn that only appends reads its own tokens and little more
    for (_, before, _), (what, prompt, answer) in zip(turns, turns[1:]):
        if what.startswith("continue"):
            assert answer.n_read <= len(prompt) - len(before) + 8, f"{what}: {answer.n_read} tokens read"


def test_policy_off_is_the_unpatched_build(case, options):
    turns = []
    for each in (dataclasses.replace(options, policy="off"), unpatched(options)):
        with LlamaServer(each) as server:
            turns.append(chat(server, case))
    assert turns[0] == turns[1]


def test_a_policy_changes_the_answer(smollm2_options):
    """Otherwise the comparisons above would compare nothing."""
    prompt = list(tokens_of("smollm2"))[:700]
    assert (
        difference(fresh(smollm2_options, prompt), fresh(dataclasses.replace(smollm2_options, policy="off"), prompt))[0]
        > 0.1
    )


@pytest.mark.parametrize("n_slots", [2, 4])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_parallel_slots(case, options, noise, n_slots, unified):
    tokens = list(tokens_of(case.name))
    prompts = [tokens[i * 37 : i * 37 + 400 + 50 * i] for i in range(n_slots)]
    n_ctx = 1024 * n_slots  # unified KV shares it, split KV gives each slot its part
    several = dataclasses.replace(options, n_parallel=n_slots, kv_unified=unified, n_ctx=n_ctx)
    with LlamaServer(several) as server, ThreadPoolExecutor(n_slots) as pool:
        first = list(pool.map(lambda slot: ask(server, prompts[slot], id_slot=slot), range(n_slots)))
        longer = [prompt + answer.tokens + tokens[600:650] for prompt, answer in zip(prompts, first)]
        second = list(pool.map(lambda slot: ask(server, longer[slot], id_slot=slot), range(n_slots)))
        assert not NO_SLOT.search(server.log())
    for slot in range(n_slots):
        assert_like_fresh(options, first[slot], prompts[slot], noise, f"slot {slot}")
        assert_like_fresh(options, second[slot], longer[slot], noise, f"slot {slot} continued")
        if (
            not unified
        ):  # with unified KV the server moves idle slots to its prompt cache, and upstream loses some models there
            assert second[slot].n_read <= 50 + 8


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("case", ["mini-hybrid, 4 sinks"], indirect=True)
def test_slots_that_share_a_prefix(case, options, noise, unified):
    """Four slots with one prefix, sink tokens included; then one edits its prompt among them, and one just beyond."""
    tokens = list(tokens_of(case.name))
    prompts = [tokens[:400] + tokens[500 + 70 * i : 550 + 80 * i] for i in range(4)]
    edited = {
        1: prompts[1][:2] + tokens[900:910] + prompts[1][2:],
        2: prompts[2][:6] + tokens[930:940] + prompts[2][6:],
    }
    several = dataclasses.replace(options, n_parallel=4, kv_unified=unified, n_ctx=4096)
    with LlamaServer(several) as server, ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda slot: ask(server, prompts[slot], id_slot=slot), range(4)))
        second = dict(pool.map(lambda slot: (slot, ask(server, edited[slot], id_slot=slot)), edited))
        third = ask(server, prompts[3] + first[3].tokens + tokens[700:720], id_slot=3)
        assert not NO_SLOT.search(server.log())
    for slot in range(4):
        assert_like_fresh(options, first[slot], prompts[slot], noise, f"slot {slot}")
    for slot in edited:
        assert_like_fresh(options, second[slot], edited[slot], noise, f"slot {slot} edited")
    assert_like_fresh(options, third, prompts[3] + first[3].tokens + tokens[700:720], noise, "slot 3 continued")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_several_completions_of_one_prompt(case, options, noise, n, unified):
    prompt = list(tokens_of(case.name))[:600]
    several = dataclasses.replace(options, n_parallel=n, kv_unified=unified, n_ctx=1024 * n)
    with LlamaServer(several) as server:
        replies = server.post(
            "/completion",
            {
                "prompt": prompt,
                "n_cmpl": n,
                "n_predict": 6,
                "temperature": 0,
                "n_probs": 5,
                "return_tokens": True,
                "ignore_eos": True,
            },
        )
        assert not NO_SLOT.search(server.log())
    assert len(replies) == n
    for reply in replies:
        assert_like_fresh(options, from_reply(reply), prompt, noise, f"n = {n}")


def test_slot_saved_and_restored_after_a_restart(case, options, noise, tmp_path):
    tokens = list(tokens_of(case.name))
    prompt = tokens[: case.n_prompt]
    options = dataclasses.replace(options, slot_save_path=f"{tmp_path}/")
    with LlamaServer(options) as server:
        answer_before = ask(server, prompt)
        saved = server.post("/slots/0?action=save", {"filename": "chat.bin"})
        assert saved["n_saved"] >= len(prompt)
    longer = prompt + answer_before.tokens + tokens[case.n_prompt : case.n_prompt + 40]
    with LlamaServer(options) as server:
        assert server.post("/slots/0?action=restore", {"filename": "chat.bin"})["n_restored"] == saved["n_saved"]
        answer = ask(server, longer, id_slot=0)
    assert_like_fresh(options, answer, longer, noise, "restored slot")
    assert answer.n_read <= 40 + 8, (
        f"{answer.n_read} of {len(longer)} tokens read after a restore that reported success"
    )


@pytest.mark.parametrize("other", ["another policy", "off"])
def test_slot_file_of_another_policy_is_refused(case, options, noise, tmp_path, other):
    prompt = list(tokens_of(case.name))[:500]
    options = dataclasses.replace(options, slot_save_path=f"{tmp_path}/")
    with LlamaServer(options) as server:
        ask(server, prompt)
        server.post("/slots/0?action=save", {"filename": "chat.bin"})
    if other == "off":
        changed = dataclasses.replace(options, policy="off")
    else:
        path = tmp_path / "other.json"
        policy = uniform(ModelGeometry.from_gguf(case.model), 80)
        if case.n_sink:
            policy = dataclasses.replace(case.policy(), n_sink=case.n_sink - 1)
        policy.save(path)
        changed = dataclasses.replace(options, policy=path)
    with LlamaServer(changed) as server:
        with pytest.raises(HwkvError, match="status 4"):
            server.post("/slots/0?action=restore", {"filename": "chat.bin"})
        answer = ask(server, prompt)
    assert_like_fresh(changed, answer, prompt, noise, f"after refusing a slot file, {other}")


@pytest.mark.parametrize("name", ["smollm2", "mini-hybrid"])
def test_tokens_read_per_turn_do_not_grow_with_the_batch(name, tmp_path):
    tokens = list(tokens_of(name))
    read = {}
    for n_batch in (64, 512, 2048):
        options = server_options(CASES[name], tmp_path, n_batch=n_batch, n_ubatch=min(n_batch, 512))
        with LlamaServer(options) as server:
            prompt, read[n_batch] = tokens[:600], []
            for turn in range(6):
                answer = ask(server, prompt)
                read[n_batch].append(answer.n_read)
                prompt = prompt + answer.tokens + tokens[600 + 40 * turn : 640 + 40 * turn]
    print(f"{name}: tokens read per turn of 40 new tokens, by -b: {read}")
    assert all(n <= 40 + 8 for turns in read.values() for n in turns[1:]), read


def test_context_shift_is_off_under_a_policy(smollm2_options):
    prompt = list(tokens_of("smollm2"))[:900]
    options = dataclasses.replace(smollm2_options, n_ctx=1024, context_shift=True)
    with LlamaServer(options) as server:
        assert "KV cache shifting is not supported for this context" in server.log()
        for cache_prompt in (True, False):
            reply = server.post(
                "/completion",
                {
                    "prompt": prompt,
                    "n_predict": 400,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": cache_prompt,
                },
            )
            assert reply["stop_type"] == "limit"
            assert 100 <= reply["tokens_predicted"] <= 1024 - 900
        assert ask(server, prompt[:200]).tokens


def test_needles_are_found_by_the_head_that_stays_full(tmp_path):
    """KV head 1 of layer 7 fetches far facts: with it full nearly all are found, with every head windowed hardly
    any."""
    geometry = ModelGeometry.from_gguf(MINI_HYBRID)
    prompts = [needle_prompt(seed, 1500, 900) for seed in range(12)]
    found = {}
    for name, policy in (("head 7.1 full", uniform(geometry, 64, [(7, 1)])), ("all windowed", uniform(geometry, 64))):
        policy.save(tmp_path / "policy.json")
        options = ServerOptions(
            model=MINI_HYBRID, policy=tmp_path / "policy.json", n_ctx=2048, n_ubatch=128, n_parallel=1, flash_attn="on"
        )
        with LlamaServer(options) as server:
            found[name] = sum(
                server.post("/completion", {"prompt": prompt, "n_predict": 3, "temperature": 0})["content"].strip()
                == answer
                for prompt, answer in prompts
            )
    print(f"needles found of {len(prompts)}: {found}")
    assert found["head 7.1 full"] >= 10
    assert found["all windowed"] <= 3


def test_router_gives_each_model_its_policy(tmp_path):
    policy = tmp_path / "policy.json"
    geometry = ModelGeometry.from_gguf(MINI_HYBRID)
    uniform(geometry, 64).save(policy)
    from hwkv_llamacpp.gguf.embed import embed

    model = tmp_path / "embedded.gguf"
    embed(MINI_HYBRID, uniform(geometry, 128), model)
    presets = tmp_path / "models.ini"
    presets.write_text(
        f"version = 1\n[*]\nc = 2048\nub = 128\nnp = 1\nhwkv-policy = embedded\n"
        f"[own]\nmodel = {model}\n[file]\nmodel = {model}\nhwkv-policy = {policy}\n"
        f"[env]\nmodel = {model}\nLLAMA_ARG_HWKV_POLICY = off\n"
        f"[bad]\nmodel = {model}\nhwkv-policy = {tmp_path}/missing.json\n"
    )
    options = ServerOptions(model=None, fit=None, extra=("--models-preset", str(presets)))
    with LlamaServer(options) as server:

        def hwkv(name):
            server.post("/completion", {"model": name, "prompt": "the", "n_predict": 1})
            return server.get(f"/props?model={name}")["hwkv"]

        assert [group["window"] for group in hwkv("own")["groups"]] == [128]
        assert [group["window"] for group in hwkv("file")["groups"]] == [64]
        assert hwkv("env") == {"active": False}
        with pytest.raises(HwkvError):
            hwkv("bad")
        assert "missing.json" in server.log()
        assert [group["window"] for group in hwkv("own")["groups"]] == [128]


def test_props_report_what_is_allocated(options, case):
    from hwkv_llamacpp.policy.footprint import predict

    with LlamaServer(options) as server:
        hwkv = server.props()["hwkv"]
    predicted = predict(
        ModelGeometry.from_gguf(case.model),
        case.policy(),
        options.n_ctx,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        type_k=options.type_k,
        type_v=options.type_v,
    )
    assert hwkv["kv_bytes"] == predicted.kv_bytes
    assert hwkv["full_kv_bytes"] == predicted.full_kv_bytes
    assert hwkv["fingerprint"] == case.policy().fingerprint(ModelGeometry.from_gguf(case.model).n_layer)


def test_shorten_to_every_length_near_a_checkpoint(case, options, noise):
    """A checkpoint holds the windows at its end only: a prompt that ends there, or one token before, must not rely on
    it."""
    tokens, n = list(tokens_of(case.name)), case.n_prompt
    kept = {}
    with LlamaServer(options) as server:
        for length in [*range(n - 7, n + 1), *range(n - N_UBATCH - 7, n - N_UBATCH)]:
            ask(server, tokens[:n], n_predict=40)
            kept[length] = ask(server, tokens[:length], n_predict=1)
    for length in (n - 5, n - N_UBATCH - 4):
        assert_like_fresh(options, kept[length], tokens[:length], noise, f"shortened to {length}")


@pytest.mark.parametrize("target, draft", [("windows", "windows"), ("off", "windows")])
def test_draft_model_with_a_policy_of_its_own(smollm2_options, tmp_path, target, draft):
    """Prompts are cut where the target's windows allow it; what the draft's would allow must not matter."""
    policy, carrier = CASES["smollm2"].policy(), tmp_path / "draft.gguf"
    embed(testmodels.smollm2(), policy, carrier)
    options = smollm2_options if target == "windows" else dataclasses.replace(smollm2_options, policy="off")
    drafting = dataclasses.replace(
        options, extra=(*options.extra, "-md", str(carrier), "--spec-type", "draft-simple", "--spec-draft-n-max", "8")
    )
    tokens = list(tokens_of("smollm2"))
    prompts = [tokens[:520], tokens[:200] + tokens[300:420], tokens[:600], tokens[:90]]
    with LlamaServer(drafting) as server:
        answers = [ask(server, prompt, n_predict=12) for prompt in prompts]
        assert not NO_SLOT.search(server.log())
    assert [len(answer.tokens) for answer in answers] == [12] * len(prompts)


@pytest.mark.parametrize(
    "n_parallel, n_ubatch, words, n_max",
    [(1, 64, (), 63), (1, 512, (), 511), (4, 512, (), 64), (4, 512, ("-kvu",), 64)],
)
def test_a_draft_longer_than_can_be_taken_back_is_refused(smollm2_options, n_parallel, n_ubatch, words, n_max):
    def server(n):
        return LlamaServer(
            dataclasses.replace(
                smollm2_options,
                n_parallel=n_parallel,
                n_batch=512,
                n_ubatch=n_ubatch,
                extra=("--spec-type", "ngram-mod", "--spec-ngram-mod-n-max", str(n), *words),
            )
        )

    with server(n_max) as served:
        assert served.props()["hwkv"]["active"]
    refused = server(n_max + 1)
    with pytest.raises(HwkvError), refused:
        pass
    assert f"at most {n_max} can be taken back" in refused.log()


# ---- random requests -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RandomCase:
    """A model of random weights whose vocabulary has no text, and the windows of its configurable layers, repeated."""

    name: str
    rows: tuple
    n_prompt: int = 900  # prompts end within 60 tokens of it
    n_ctx: int = 2048
    n_sink: int = 0
    n_requests: int = 40

    def options(self, folder, model):
        geometry = ModelGeometry.from_gguf(model)
        rows = {x.layer: list(self.rows[i % len(self.rows)]) for i, x in enumerate(geometry.configurable)}
        dataclasses.replace(pattern(geometry, by_layer=rows), n_sink=self.n_sink).save(folder / "policy.json")
        return ServerOptions(
            model=model,
            policy=folder / "policy.json",
            n_ctx=self.n_ctx,
            n_batch=256,
            n_ubatch=128,
            n_parallel=1,
            n_threads=1,
            flash_attn="off",
            type_k="f32",
            type_v="f32",
            # these models say that they were trained for 256 positions
            extra=("--override-kv", f"{geometry.architecture}.context_length=int:32768"),
        )

    def prompts(self, rng):
        """A chat: each prompt is the last one, cut back and continued, often where the server made a checkpoint."""
        prompt = self.text(rng, self.n_prompt)
        for _ in range(self.n_requests):
            yield list(prompt)
            near = [len(prompt) - 4, len(prompt) - 4 - 128, self.n_prompt]
            cut = rng.choice(near) + rng.integers(-3, 4) if rng.random() < 0.7 else rng.integers(1, len(prompt))
            prompt = prompt[:cut] + self.text(rng, rng.integers(0, 6))
            if rng.random() < 0.4 or not 0 <= self.n_prompt - len(prompt) < 200:
                prompt += self.text(rng, max(1, self.n_prompt + rng.integers(-8, 9) - len(prompt)))

    @staticmethod
    def text(rng, n):
        return [int(token) for token in rng.integers(1, 120, n)]


RANDOM_CASES = [
    RandomCase("llama-dense", ((1, 1),)),
    RandomCase("llama-dense", ((1, 100), (None, 1))),
    RandomCase("llama-dense", ((2, 3), (1, None))),
    RandomCase("llama-dense", ((2, 2), (3, 3))),
    RandomCase("llama-dense", ((1, 3), (2, 200)), n_sink=4),
    # its own windows are chunks of 8192 tokens
    RandomCase("llama4-moe", ((1, 64), (None, 2)), n_prompt=8196, n_ctx=16384, n_requests=8),
]


@pytest.mark.parametrize("random_case", RANDOM_CASES, ids=lambda c: f"{c.name} {c.rows} {c.n_sink}")
def test_random_requests_equal_those_without_a_cache(random_case, random_models, tmp_path):
    rng = np.random.default_rng(1)
    model = next(path for path in random_models if path.stem == random_case.name)
    options = random_case.options(tmp_path, model)
    worst, read = 0.0, []
    with LlamaServer(options, tmp_path / "cached.log") as server, LlamaServer(options, tmp_path / "fresh.log") as other:
        for prompt in random_case.prompts(rng):
            answer = ask(server, prompt, n_predict=3)
            expected = ask(other, prompt, n_predict=3, cache_prompt=False)
            worst = max(worst, difference(answer, expected)[0])
            read.append(answer.n_read)
            assert expected.n_cached == 0
            assert_same(answer, expected, 0.0, f"request {len(read)} of {len(prompt)} tokens")
    assert any(8 < n < 300 for n in read), f"no checkpoint was continued from: {read}"
    assert min(read) < 8, f"no prompt was continued: {read}"
    print(f"{random_case}: log-probabilities within {worst:.1e}, tokens read: {read}")


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_drafts_beside_another_slot(random_models, tmp_path, unified):
    """A slot is cut back to where its ring holds the window and no more, and drafts while another one reads prompts:
    whatever the other takes, drafts are taken back."""
    rng = np.random.default_rng(1)
    model = next(path for path in random_models if path.stem == "llama-dense")
    case = RandomCase("llama-dense", ((100, 100),))
    options = dataclasses.replace(case.options(tmp_path, model), n_batch=512, n_ubatch=256)
    words = ("-md", str(model), "--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0")
    drafting = dataclasses.replace(
        options, n_parallel=2, kv_unified=unified, n_ctx=4096, extra=(*options.extra, *words)
    )
    base, done = case.text(rng, 515), threading.Event()

    def other_slot(server):
        others = np.random.default_rng(2)
        while not done.is_set():
            ask(server, case.text(others, others.integers(2, 7)), n_predict=3, id_slot=1)

    asked = []
    with LlamaServer(drafting, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(other_slot, server)
        try:
            for cut in range(102, 118):
                ask(server, base, n_predict=1, id_slot=0)
                prompt = base[:cut] + case.text(rng, 3)
                asked.append((prompt, ask(server, prompt, n_predict=12, id_slot=0)))
        finally:
            done.set()
        beside.result()
    with LlamaServer(options, tmp_path / "fresh.log") as server:
        for prompt, answer in asked:
            expected = ask(server, prompt, n_predict=12, cache_prompt=False)
            # the server gives no probabilities of accepted drafts: the tokens, up to one where the best two are equal
            for step, token in enumerate(expected.tokens):
                best = sorted(expected.top[step].values(), reverse=True)
                if best[0] - best[1] < 1e-4:
                    break
                assert answer.tokens[step] == token, f"cut to {len(prompt) - 3}, token {step}"


# ---- LlamaServer itself ----------------------------------------------------------------------------------------------


def test_a_server_that_cannot_start_says_why(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(MINI_HYBRID.read_bytes()[:2000])
    server = LlamaServer(ServerOptions(model=broken))
    with pytest.raises(HwkvError, match="did not start: exit code 1"):
        server.start()
    assert server.exit_cause().startswith("exit code 1: ") and "error loading model" in server.exit_cause()


def test_stop_leaves_no_process(tmp_path):
    server = LlamaServer(ServerOptions(model=MINI_HYBRID, n_ctx=256, n_parallel=1), tmp_path / "server.log")
    server.start()
    assert server.exit_cause() is None
    assert server.memory()["rss_bytes"] > 0
    server.stop()
    assert server.process.poll() is not None
    server.stop()


def test_a_killed_server_is_told_from_a_refused_request(tmp_path):
    with LlamaServer(ServerOptions(model=MINI_HYBRID, n_ctx=256, n_parallel=1)) as server:
        with pytest.raises(HwkvError, match="status 4"):
            server.post("/completion", {"prompt": []})
        server.process.kill()
        with pytest.raises(HwkvError, match="killed by SIGKILL"):
            server.post("/completion", {"prompt": "x"})


def test_options_become_flags():
    options = ServerOptions(model="m.gguf", n_ctx=512, kv_unified=False, policy="off", extra=("--verbose",))
    assert options.arguments() == [
        "-m",
        "m.gguf",
        "--hwkv-policy",
        "off",
        "-c",
        "512",
        "--no-kv-unified",
        "-fit",
        "off",
        "--verbose",
    ]
