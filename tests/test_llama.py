"""hwkv_llamacpp.Llama: llama_cpp.Llama's calls under a policy, each equal to the same call on a new object."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from answers import TOP, Answer, assert_same, difference
from f32 import f32_copy
from minilang import needle_prompt

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.baselines.uniform import uniform
from hwkv_llamacpp.errors import HwkvError
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.gguf.embed import embed
from hwkv_llamacpp.measure.prompt import diary
from hwkv_llamacpp.runtime import native

ROOT = Path(__file__).resolve().parent.parent
MINI_HYBRID = ROOT / "tests" / "data" / "mini-hybrid-f16.gguf"
F32 = 0  # GGML_TYPE_F32

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", autouse=True)
def built():
    try:
        native.library()
    except HwkvError as error:
        pytest.skip(str(error))


def new(model, policy, **more):
    """A Llama with small batches and the least noise."""
    from hwkv_llamacpp import Llama

    return Llama(
        str(model),
        policy=policy,
        **{
            "n_ctx": 2048,
            "n_batch": 128,
            "n_ubatch": 128,
            "n_threads": 2,
            "flash_attn": True,
            "type_k": F32,
            "type_v": F32,
            "verbose": False,
            **more,
        },
    )


def answer(llm, prompt, n=6, n_top=TOP):
    """Greedy tokens with their top log-probabilities, and how many tokens were evaluated for the prompt."""
    read, decode = [], llm._ctx.decode
    llm._ctx.decode = lambda batch: (read.append(batch.n_tokens()), decode(batch))
    try:
        tokens, top = [], []
        for token in llm.generate(prompt, temp=0.0):
            logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).astype(np.float64)
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            best = np.argsort(logprobs)[-n_top:]
            tokens.append(token)
            top.append({int(t): float(logprobs[t]) for t in best})
            if len(tokens) == n:
                break
    finally:
        llm._ctx.decode = decode
    return Answer(tokens, top, sum(read) - (n - 1), len(prompt) - sum(read) + n - 1)


MODELS = {
    "smollm2": (
        lambda: f32_copy(testmodels.smollm2()),
        [[None, 64, 100], [130, 64, 64], [64, 100, 64]],
        lambda: diary(110),
    ),
    "mini-hybrid": (
        lambda: MINI_HYBRID,
        [[64, None, 200, 64], [100, 64, None, 64]],
        lambda: needle_prompt(3, 1600, 900)[0],
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def setup(request):
    """(model path, policy, tokens of a long text)"""
    model, rows, text = MODELS[request.param]
    geometry = ModelGeometry.from_gguf(model())
    policy = pattern(
        geometry, by_layer={layer.layer: rows[i % len(rows)] for i, layer in enumerate(geometry.configurable)}
    )
    llm = new(model(), None, n_ctx=256)
    return model(), policy, llm.tokenize(text().encode())


def calls(llm, tokens, after=lambda llm, i: None, n_top=TOP):
    """[(what, prompt, answer)]: growing, edited and shortened prompts on one object."""
    base, short = tokens[:700], tokens[:430]
    done = [("first", base, answer(llm, base, n_top=n_top))]

    def call(what, prompt):
        after(llm, len(done))
        done.append((what, prompt, answer(llm, prompt, n_top=n_top)))

    call("appended", base + done[-1][2].tokens + tokens[700:760])
    call("appended again", done[-1][1] + done[-1][2].tokens + tokens[760:790])
    call("same prompt", done[-1][1])
    call("last message edited", base + tokens[800:860])
    call("early message edited", base[:140] + tokens[900:930] + base[140:])
    call("shortened", short)
    call("appended to the shortened", short + done[-1][2].tokens + tokens[1000:1060])
    call("another text", tokens[30:400])
    call("back to the first", base)
    return done


@pytest.fixture(scope="module")
def noise(setup):
    """What other batch splits do without a policy: calls on one object against new objects."""
    model, _, tokens = setup
    turns = calls(new(model, None), tokens)
    value = max(difference(turn, answer(new(model, None), prompt))[0] for _, prompt, turn in turns[1:6])
    print(f"noise without a policy: {value:.4f}")
    return value


def test_calls_equal_a_new_object(setup, noise):
    model, policy, tokens = setup
    llm = new(model, policy)
    assert llm.hwkv_info()["active"]
    turns = calls(llm, tokens)
    for what, prompt, turn in turns:
        assert_same(turn, answer(new(model, policy), prompt), noise, what)
    for i in (1, 2):
        assert turns[i][2].n_read <= len(turns[i][1]) - len(turns[i - 1][1]), "an appended prompt was read again"


@pytest.mark.parametrize(
    ("name", "n_sink"), [("jamba-dense", 0), ("falcon-h1-dense", 0), ("gpt-oss-moe", 0), ("llama-dense", 4)]
)
def test_calls_on_other_architectures(random_models, name, n_sink):
    """With random weights a policy moves log-probabilities little, so those of the whole vocabulary are compared, and
    the limit is a share of what the policy does to them."""
    model = next(path for path in random_models if path.stem == name)
    policy = dataclasses.replace(uniform(ModelGeometry.from_gguf(model), 64), n_sink=n_sink)
    llm = new(model, policy)
    assert llm.hwkv_info()["n_sink"] == n_sink
    tokens = np.random.default_rng(0).integers(1, llm.n_vocab(), 1100).tolist()
    n_top = llm.n_vocab()
    turns = calls(llm, tokens, n_top=n_top)
    effect = difference(turns[0][2], answer(new(model, None), tokens[:700], n_top=n_top))[0]
    for what, prompt, turn in turns:
        moved = difference(turn, answer(new(model, policy), prompt, n_top=n_top))[0]
        print(f"{what}: {moved:.1e}; the policy itself: {effect:.1e}")
        assert moved < effect / 4, what


def test_reset_between_calls_changes_no_answer(setup, noise):
    model, policy, tokens = setup
    for (what, _, kept), (_, _, reset) in zip(
        calls(new(model, policy), tokens), calls(new(model, policy), tokens, lambda llm, i: i % 3 == 0 and llm.reset())
    ):
        assert_same(reset, kept, noise, f"{what}, with reset() before some calls")


def test_going_back_by_hand_evaluates_again(setup, noise):
    """Setting n_tokens and calling eval() is how users of llama_cpp rewind; stock code would go on with the wrong
    past."""
    model, policy, tokens = setup
    llm = new(model, policy)
    llm.eval(tokens[:700])
    llm.n_tokens = 300
    llm.eval(tokens[800:830])
    prompt = tokens[:300] + tokens[800:830]
    assert llm.input_ids[: llm.n_tokens].tolist() == prompt
    assert_same(answer(llm, prompt), answer(new(model, policy), prompt), noise, "rewound by hand")


def test_saved_state_goes_on(setup, noise):
    model, policy, tokens = setup
    llm = new(model, policy)
    first = answer(llm, tokens[:700])
    state = llm.save_state()
    answer(llm, tokens[900:1300])
    llm.load_state(state)
    longer = tokens[:700] + first.tokens + tokens[700:740]
    turn = answer(llm, longer)
    assert_same(turn, answer(new(model, policy), longer), noise, "after load_state")
    assert turn.n_read <= 40 + 8
    llm.load_state(state)
    assert_same(
        answer(llm, tokens[:350]), answer(new(model, policy), tokens[:350]), noise, "shortened after load_state"
    )


def test_state_of_another_policy_is_refused_and_forgotten(setup, noise):
    model, policy, tokens = setup
    donor = new(model, uniform(ModelGeometry.from_gguf(model), 80))
    answer(donor, tokens[:500])
    llm = new(model, policy)
    answer(llm, tokens[:600])
    with pytest.raises(RuntimeError):
        llm.load_state(donor.save_state())
    for prompt in (tokens[:500], tokens[:600]):
        assert_same(answer(llm, prompt), answer(new(model, policy), prompt), noise, "after a refused state")


def test_saved_state_goes_on_with_smaller_batches(setup, noise):
    """The windows then have fewer cells, yet enough."""
    model, policy, tokens = setup
    donor = new(model, policy, n_batch=512, n_ubatch=512)
    first = answer(donor, tokens[:700])
    llm = new(model, policy, n_batch=512)
    llm.load_state(donor.save_state())
    longer = tokens[:700] + first.tokens + tokens[700:740]
    turn = answer(llm, longer)
    assert_same(turn, answer(new(model, policy), longer), noise, "after load_state")
    assert turn.n_read <= 40 + 8


def test_chat_and_stream_without_policy_are_stock(setup):
    model, _, _ = setup
    stock_class = native.load().Llama
    stock = stock_class(str(model), n_ctx=512, n_threads=2, verbose=False)
    ours = new(model, None, n_ctx=512, n_batch=512, n_ubatch=512, flash_attn=False, type_k=None, type_v=None)
    messages = [{"role": "user", "content": "the old man ran to the sea"}]
    for llm in (stock, ours):
        assert isinstance(llm, stock_class)
    replies = [
        llm.create_chat_completion(messages, temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
        for llm in (stock, ours)
    ]
    assert replies[0] == replies[1]
    streamed = "".join(
        chunk["choices"][0]["text"] for chunk in ours("the old man", temperature=0, max_tokens=8, stream=True)
    )
    assert streamed == stock("the old man", temperature=0, max_tokens=8)["choices"][0]["text"]


def test_ten_turns_of_a_chat_under_a_policy(setup):
    """Streamed or not, the replies are the same."""
    model, policy, tokens = setup
    objects = [new(model, policy, n_ctx=2048) for _ in range(2)]
    messages = [{"role": "user", "content": objects[0].detokenize(tokens[:400]).decode(errors="replace")}]
    for turn in range(10):
        replies = []
        for i, llm in enumerate(objects):
            stream = turn % 2 == i
            said = llm.create_chat_completion(messages, temperature=0, max_tokens=6, stream=stream)
            replies.append(
                "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said)
                if stream
                else said["choices"][0]["message"]["content"]
            )
        assert replies[0] == replies[1], f"turn {turn}"
        messages += [
            {"role": "assistant", "content": replies[0]},
            {"role": "user", "content": f"and {turn} more of the same"},
        ]
    assert all(llm.hwkv_info()["active"] and llm.n_tokens > 450 for llm in objects)


def test_prompt_lookup_decoding_gives_the_same_tokens():
    """Drafted tokens that are wrong are taken back; a hybrid cannot do that, so its tokens are evaluated again."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = new(MINI_HYBRID, None, n_ctx=256).tokenize(needle_prompt(5, 500, 300)[0].encode())
    policy = uniform(ModelGeometry.from_gguf(MINI_HYBRID), 64, [(7, 1)])
    results = []
    for draft in (None, LlamaPromptLookupDecoding(num_pred_tokens=5)):
        llm = new(
            MINI_HYBRID, policy, n_ctx=1024, draft_model=draft, logits_all=True
        )  # stock needs it with n_ctx > n_batch
        generated = llm.generate(prompt, temp=0.0)
        results.append([next(generated) for _ in range(24)])
    assert results[0] == results[1]


# ---- the policy argument
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    return uniform(ModelGeometry.from_gguf(MINI_HYBRID), 64, [(7, 1)])


def fingerprint(policy):
    return policy.fingerprint(ModelGeometry.from_gguf(MINI_HYBRID).n_layer)


def test_forms_of_the_policy_argument(policy, tmp_path):
    path, gguf = tmp_path / "policy.json", tmp_path / "embedded.gguf"
    policy.save(path)
    embed(MINI_HYBRID, policy, gguf)
    for model, form in (
        (MINI_HYBRID, policy),
        (MINI_HYBRID, path),
        (MINI_HYBRID, str(path)),
        (MINI_HYBRID, gguf),
        (gguf, "embedded"),
        (gguf, "auto"),
    ):
        assert new(model, form, n_ctx=1024).hwkv_info()["fingerprint"] == fingerprint(policy)
    for model, form in (
        (MINI_HYBRID, None),
        (MINI_HYBRID, "off"),
        (gguf, None),
        (MINI_HYBRID, "auto"),
        (MINI_HYBRID, Policy()),
    ):
        assert new(model, form, n_ctx=1024).hwkv_info() == {"active": False}
    with pytest.raises(HwkvError, match="has no embedded policy"):
        new(MINI_HYBRID, "embedded")


def test_flash_attention_unless_the_caller_says_otherwise(policy):
    from hwkv_llamacpp import Llama

    bytes_ = [
        Llama(str(MINI_HYBRID), policy=policy, n_ctx=1024, n_threads=1, verbose=False, **more).hwkv_info()["kv_bytes"]
        for more in ({}, {"flash_attn": True}, {"flash_attn": False})
    ]
    assert bytes_[0] == bytes_[1] < bytes_[2]  # one head more in layer 7 than in 3 is padded for without


@pytest.mark.parametrize("length", [100, 127, 128, 300])
def test_path_of_any_length_beside_other_overrides(policy, length):
    with tempfile.TemporaryDirectory(prefix="hwkv späce ümläut ", dir="/tmp") as folder:
        while length - len(os.fsencode(folder)) > 200:  # a file name holds at most 255 bytes
            folder = os.path.join(folder, "d" * 90)
            os.mkdir(folder)
        path = os.path.join(folder, "p" * (length - len(os.fsencode(folder)) - 6) + ".json")
        assert len(os.fsencode(path)) == length
        policy.save(path)
        llm = new(
            MINI_HYBRID,
            path,
            n_ctx=1024,
            kv_overrides={
                "qwen35.context_length": 1234,
                "tokenizer.ggml.add_bos_token": True,
                "qwen35.rope.freq_base": 20000.0,
                "general.name": "a name",
            },
        )
    assert llm.hwkv_info()["fingerprint"] == fingerprint(policy)
    assert llm._model.n_ctx_train() == 1234
    assert llm._model.add_bos_token()


def test_wrong_arguments_are_told(policy, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_ctxx'; did you mean 'n_ctx'"):
        new(MINI_HYBRID, None, n_ctxx=5)
    with pytest.raises(TypeError, match="did you mean 'policy'"):
        new(MINI_HYBRID, None, polcy="x")
    with pytest.raises(ValueError, match="give the policy as policy="):
        new(MINI_HYBRID, policy, kv_overrides={"hwkv.policy": "off"})
    with pytest.raises(TypeError, match="a path, a Policy"):
        new(MINI_HYBRID, 5)
    with pytest.raises(HwkvError, match="missing.json"):
        new(MINI_HYBRID, tmp_path / "missing.json")
    with pytest.raises(HwkvError, match="layer 0"):
        new(MINI_HYBRID, Policy({0: (64, 64, 64, 64)}))
    with pytest.raises(HwkvError, match="layer 3 has 2 windows"):
        new(MINI_HYBRID, Policy({3: (64, 64)}))
    with pytest.raises(ValueError, match="does not exist"):
        new(tmp_path / "no.gguf", policy)


def test_allocated_bytes_are_the_predicted_ones(policy):
    from hwkv_llamacpp.policy.footprint import predict

    geometry = ModelGeometry.from_gguf(MINI_HYBRID)
    for flash_attn in (True, False):
        for kv_type, number in (("f32", 0), ("f16", 1)):
            info = new(MINI_HYBRID, policy, flash_attn=flash_attn, type_k=number, type_v=number).hwkv_info()
            predicted = predict(
                geometry, policy, 2048, n_batch=128, n_ubatch=128, type_k=kv_type, type_v=kv_type, flash_attn=flash_attn
            )
            assert info["kv_bytes"] == predicted.kv_bytes
            assert info["kv_bytes"] == sum(group["bytes"] for group in info["groups"])


def test_a_closed_one_says_so(policy):
    llm = new(MINI_HYBRID, policy)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.hwkv_info()


def test_a_copy_has_the_same_policy(policy):
    llm = new(MINI_HYBRID, policy, n_ctx=1024, kv_overrides={"qwen35.context_length": 1234})
    state = llm.__getstate__()
    assert state["policy"] == policy and state["kv_overrides"] == {"qwen35.context_length": 1234}
    copy = type(llm).__new__(type(llm))
    copy.__setstate__(state)
    assert copy.hwkv_info() == llm.hwkv_info()


# ---- which library is loaded
# --------------------------------------------------------------------------------------------


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.long
def test_old_libraries_on_the_loader_path_are_not_taken(tmp_path):
    bin_dir = native.build_dir(upstream=True) / "bin"
    for path in bin_dir.glob("lib*"):
        shutil.copy(path, tmp_path / path.name, follow_symlinks=False)
    done = run_python(
        "from hwkv_llamacpp.runtime import native; native.load(); print(open('/proc/self/maps').read())",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert str(native.library().parent) in done.stdout and str(tmp_path) not in done.stdout


@pytest.mark.long
def test_another_build_loaded_before_is_named():
    other = native.build_dir(upstream=True) / "bin"
    done = run_python(
        "import llama_cpp\nfrom hwkv_llamacpp.runtime import native\nnative.load()", LLAMA_CPP_LIB_PATH=str(other)
    )
    assert done.returncode == 1
    assert f"this process has {other}/lib" in done.stderr.splitlines()[-1]
