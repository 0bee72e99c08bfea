"""The grouped runtime computes the same function as a masked full cache.

Logits of libllama under a policy are held against `reference`, a NumPy forward pass that shares no code with it.

How close is close enough: the K/V type and the attention kernel alone cause an error that has nothing to do with
windows. F16 rounds K and V to 11 bits, q4_0 to 4; FlashAttention on the CPU may add up V in F16. Each test measures
that error first, as the distance between upstream's own path without a policy and the full reference (`floor`), checks
that it is as small as the type allows (FLOOR_LIMIT), and allows a windowed run WINDOWED_FACTOR times as much, because a
softmax over 16 keys averages less rounding away than one over a thousand. 10 times is the most that was seen: rotary
angles in F32 lose digits as positions grow, which leaves SmolLM2's last tokens at 2e-11 with full heads and at 2e-10
with small windows (4e-12 and 5e-12 against a reference that rounds its angles alike). The negative controls show what
this resolves: one window off by one, or two heads swapped, is at least NOTICED_FACTOR times the floor away.

Errors are normalised mean squares (NMSE) of logits, each row centred because softmax ignores its mean.
"""

from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
import reference
from f32 import f32_copy
from minilang import needle_prompt, noise
from reference import random_models

from hwkv_llamacpp import HwkvError, Policy

try:
    from parity_runtime import Runtime
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

WINDOWED_FACTOR = 20
NOTICED_FACTOR = 1000

# largest NMSE of upstream's own path against the full reference, by K/V type and FlashAttention
EXACT = ("f32", False)  # with FlashAttention, F32 K/V are cast to F16
FLOOR_LIMIT = {
    ("f16", False): 1e-5,
    ("f16", True): 1e-3,
    ("q8_0 f16", False): 1e-3,  # a quantised V needs FlashAttention
    ("q8_0", True): 1e-3,
    ("q4_0", True): 1e-1,
}
KINDS = [EXACT, *FLOOR_LIMIT]
OTHER_TYPES = {(name, True): 1e-1 for name in ("f32", "bf16", "q4_1", "iq4_nl", "q5_0", "q5_1", "q8_0 q5_1")}
FLOOR_LIMIT |= OTHER_TYPES

N_DECODE = 20
PARTS = {"prefill": slice(None, -N_DECODE), "decode": slice(-N_DECODE, None)}  # of the compared positions


@dataclass
class Model:
    """A model, its tokens, and the reference logits for each policy, computed once.

    stride: compare the logits of every stride-th token of the prefill, and of every decoded token.
    exact_limit: largest NMSE of upstream's own path against the full reference with F32 K/V.
    """

    reference: object  # from reference.load()
    policies: dict
    tokens: list
    n_ctx: int
    n_threads: int = 1
    stride: int = 7
    exact_limit: float = 1e-9
    _runtimes: dict = field(default_factory=dict)
    _expected: dict = field(default_factory=dict)
    _actual: dict = field(default_factory=dict)
    _floors: dict = field(default_factory=dict)

    @property
    def n_prefill(self):
        return len(self.tokens) - N_DECODE

    @cached_property
    def positions(self):
        """Where logits are compared: spread over the prefill, and every decoded token."""
        return np.concatenate([np.arange(0, self.n_prefill, self.stride), np.arange(self.n_prefill, len(self.tokens))])

    def expected(self, policy):
        """Reference logits at `positions`."""
        key = policy.to_json()
        if key not in self._expected:
            self._expected[key] = self.reference.logits(self.tokens, policy.layers, policy.n_sink, self.positions)
        return self._expected[key]

    def actual(self, policy, kv_type, flash, n_ubatch):
        """Runtime logits at `positions`. Checks that the policy is at work."""
        key = (policy.to_json(), kv_type, flash, n_ubatch)
        if key not in self._actual:
            with self.runtime(policy).context(self.n_ctx, n_ubatch, kv_type, flash) as context:
                self.check_cache(context.info(), policy)
                self._actual[key] = context.run(self.tokens, self.positions, self.n_prefill)
        return self._actual[key]

    def runtime(self, policy):
        key = policy and policy.to_json()
        if key not in self._runtimes:
            self._runtimes[key] = Runtime(self.reference.weights.path, policy, self.n_threads)
        return self._runtimes[key]

    def check_cache(self, info, policy):
        """The context keeps this policy's windows, in rings too small for the prompt."""
        assert info["active"] and info["fingerprint"] == policy.fingerprint(self.reference.n_layer)
        wanted = {
            w for layer, heads in self.reference.configurable.items() for w in policy.layers.get(layer, (None,) * heads)
        }
        assert {group["window"] for group in info["groups"]} == wanted
        assert all(group["cells"] < self.n_prefill for group in info["groups"] if group["window"] is not None)

    def floor(self, kv_type, flash, n_ubatch):
        """Error of this K/V type and kernel without any window, by part."""
        # FlashAttention on the CPU has two kernels: the one for larger batches adds up V in F32
        key = (kv_type, flash, n_ubatch if flash else None)
        if key not in self._floors:
            with self.runtime(None).context(self.n_ctx, n_ubatch, kv_type, flash) as context:
                actual = context.run(self.tokens, self.positions, self.n_prefill)
            errors = by_part(actual, self.expected(Policy()))
            limit = FLOOR_LIMIT.get((kv_type, flash), self.exact_limit)
            assert max(errors.values()) < limit, f"the reference is not this model: NMSE {errors}"
            self._floors[key] = errors
        return self._floors[key]

    def close(self):
        for runtime in self._runtimes.values():
            runtime.close()


def nmse(actual, expected):
    """Mean square of the difference over the mean square of `expected`, rows centred."""
    actual, expected = (x - x.mean(-1, keepdims=True, dtype=np.float64) for x in (actual, expected))
    return np.square(actual - expected).sum() / np.square(expected).sum()


def by_part(actual, expected):
    return {part: nmse(actual[select], expected[select]) for part, select in PARTS.items()}


def rows(truth, *patterns, n_sink=0):
    """Policy that gives the configurable layers these rows in turn."""
    return Policy({layer: patterns[i % len(patterns)] for i, layer in enumerate(truth.configurable)}, n_sink)


def english(n_words, seed):
    """Simple English sentences of about n_words words."""
    rng = np.random.default_rng(seed)
    text = ""
    while text.count(" ") < n_words:
        text += noise(rng)
    return text.strip()


def four_head_policies(truth):
    """Policies for models with two configurable layers of 4 KV heads."""
    return {
        "different": rows(truth, (16, 64, 200, 300), (None, 48, 256, 100)),
        "equal, not adjacent": rows(truth, (64, None, 64, 128), (128, 64, None, 64)),
        "all 16": rows(truth, (16,) * 4),
        "all windowed": rows(truth, (32, 128, 32, 256), (256, 17, 33, 255)),
        "one layer": Policy({max(truth.configurable): (64, None, 300, None)}),
        "1 sink": rows(truth, (32, 128, 32, 256), (256, 17, 33, 255), n_sink=1),
        "4 sinks": rows(truth, (16, 64, 200, 300), (None, 48, 256, 100), n_sink=4),
        "64 sinks": rows(truth, (64, None, 64, 128), (16, 64, None, 64), n_sink=64),
        "more sinks than window": rows(truth, (16,) * 4, n_sink=70),
    }


@pytest.fixture(scope="module")
def random_dense(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("random") / "llama.gguf")
    random_models.write_llama(path, seed=1, n_layer=2)
    tokens = np.random.default_rng(2).integers(0, 256, 1300)
    truth = reference.load(path)
    with closing(Model(truth, four_head_policies(truth), tokens, n_ctx=2048)) as model:
        yield model


@pytest.fixture(scope="module")
def random_hybrid(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("random") / "qwen35.gguf")
    random_models.write_qwen35(path, seed=1)
    tokens = np.random.default_rng(2).integers(0, 256, 1300)
    truth = reference.load(path)
    with closing(Model(truth, four_head_policies(truth), tokens, n_ctx=2048)) as model:
        yield model


@pytest.fixture(scope="module")
def mini_hybrid_f32(mini_hybrid):
    path = str(f32_copy(mini_hybrid))
    text = "".join(prompt + " " + value + "." for prompt, value in (needle_prompt(seed, 400, 350) for seed in range(4)))
    with Runtime(path, n_threads=1) as runtime:
        tokens = runtime.tokenize(text)
    truth = reference.load(path)
    with closing(Model(truth, four_head_policies(truth), tokens, n_ctx=2048)) as model:
        yield model


@pytest.fixture(scope="module")
def smollm2_f32(smollm2):
    path = str(f32_copy(smollm2))
    with Runtime(path, n_threads=1) as runtime:
        tokens = runtime.tokenize(english(800, seed=1))[:832]
    truth = reference.load(path)
    policies = {
        "different": rows(truth, (16, 64, 160), (None, 100, 160), (64, None, 64), (128, 16, None), (None, None, None)),
        "all windowed": rows(truth, (16, 64, 16), (128, 128, 32)),
        "4 sinks": rows(truth, (16, 64, 160), (None, 100, 160), n_sink=4),
    }
    with closing(Model(truth, policies, tokens, n_ctx=1024, stride=23)) as model:
        yield model


@pytest.fixture(scope="module")
def gemma3_f32(gemma3):
    path = str(f32_copy(gemma3))
    with Runtime(path, n_threads=1) as runtime:
        tokens = runtime.tokenize(english(780, seed=2))[:850]
    truth = reference.load(path)
    policies = {
        "different": Policy({5: (16,), 11: (None,), 17: (300,)}),
        "all 16": rows(truth, (16,)),
        "64 sinks": Policy({5: (16,), 11: (None,), 17: (300,)}, n_sink=64),
    }
    # ggml's GELU on the CPU is a table of F16 values
    with closing(Model(truth, policies, tokens, n_ctx=1024, stride=23, exact_limit=1e-6)) as model:
        yield model


SMALL_MODELS = ["random_dense", "random_hybrid", "mini_hybrid_f32"]
FOUR_HEAD_POLICIES = [
    "different",
    "equal, not adjacent",
    "all 16",
    "all windowed",
    "one layer",
    "1 sink",
    "4 sinks",
    "64 sinks",
    "more sinks than window",
]


def check_parity(model, policy, settings):
    """Holds a policy's error under each (kv_type, flash, n_ubatch) against the floor."""
    failed = []
    for kv_type, flash, n_ubatch in settings:
        expected, actual = model.expected(policy), model.actual(policy, kv_type, flash, n_ubatch)
        floor = model.floor(kv_type, flash, n_ubatch)
        for part, error in by_part(actual, expected).items():
            worst = np.abs(actual - expected)[PARTS[part]].max()
            line = (
                f"{kv_type:8} flash={flash!s:5} ub={n_ubatch:3} {part:7}: NMSE {error:.1e}, "
                f"{error / floor[part]:.2f} times the full cache's {floor[part]:.1e}; largest difference {worst:.1e}"
            )
            print(line)
            if not error < WINDOWED_FACTOR * floor[part]:
                failed.append(line)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", FOUR_HEAD_POLICIES)
@pytest.mark.parametrize("model_name", SMALL_MODELS)
def test_small_model(model_name, name, request):
    """Every K/V type and kernel, ubatches smaller and larger than the windows."""
    model = request.getfixturevalue(model_name)
    settings = [(*kind, n_ubatch) for kind in KINDS for n_ubatch in (32, 512)]
    if name != "different":
        settings = [
            (*EXACT, 32),
            (*EXACT, 512),
            ("f16", True, 32),
            ("f16", True, 512),
            ("q8_0", True, 512),
            ("q4_0", True, 32),
        ]
    if model.policies[name].n_sink:
        settings = [(*EXACT, 32), ("f16", True, 512), ("q8_0", True, 32), ("q4_0", True, 32)]
    if (model_name, name) in (("random_dense", "different"), ("random_hybrid", "4 sinks")):
        settings += [(*kind, 32) for kind in OTHER_TYPES]
    check_parity(model, model.policies[name], settings)


@pytest.mark.parametrize("name", ["different", "all windowed", "4 sinks"])
def test_smollm2(smollm2_f32, name):
    check_parity(
        smollm2_f32,
        smollm2_f32.policies[name],
        {
            "different": [
                ("f32", False, 64),
                ("f32", False, 512),
                ("f16", True, 256),
                ("q8_0", True, 64),
                ("q4_0", True, 512),
            ],
            "all windowed": [("f32", False, 512), ("f16", True, 256)],
            "4 sinks": [("f32", False, 64)],
        }[name],
    )


@pytest.mark.parametrize("name", ["different", "all 16", "64 sinks"])
def test_gemma3(gemma3_f32, name):
    """The model's own sliding window of 512 turns over as well: its cache has 768 cells with these ubatches."""
    check_parity(
        gemma3_f32,
        gemma3_f32.policies[name],
        {
            "different": [("f32", False, 64), ("f16", True, 256), ("q8_0", True, 64)],
            "all 16": [("f32", False, 256), ("f16", True, 256)],
            "64 sinks": [("f32", False, 64)],
        }[name],
    )


@pytest.mark.parametrize("model_name", SMALL_MODELS + ["smollm2_f32", "gemma3_f32"])
def test_wrong_policy_is_noticed(model_name, request):
    """Negative control: against the reference of a slightly wrong policy, the same comparison fails by far."""
    model = request.getfixturevalue(model_name)
    policy = model.policies["different"]
    layer = min(policy.layers)
    row = policy.layers[layer]
    wrong = {
        "window one too long": (row[0] + 1, *row[1:]),
        "window one too short": (row[0] - 1, *row[1:]),
        "window left out": (None, *row[1:]),
    }
    if len(row) > 1:
        wrong["heads swapped"] = (row[1], row[0], *row[2:])
    exact, usual = (*EXACT, 64), ("f16", True, 256)
    for what, wrong_row in wrong.items():
        expected = model.expected(Policy({**policy.layers, layer: wrong_row}))
        ratios = {
            setting: min(
                error / model.floor(*setting)[part]
                for part, error in by_part(model.actual(policy, *setting), expected).items()
            )
            for setting in (exact, usual)
        }
        print(
            f"{what:20}: error {ratios[exact]:.2g} times the floor with F32 K/V, {ratios[usual]:.2g} times with "
            "F16 and FlashAttention"
        )
        assert ratios[exact] > NOTICED_FACTOR, f"{what} goes unnoticed"


@pytest.mark.parametrize("model_name", SMALL_MODELS)
def test_wrong_n_sink_is_noticed(model_name, request):
    model = request.getfixturevalue(model_name)
    policy, setting = model.policies["4 sinks"], (*EXACT, 32)
    for n_sink in (3, 5):
        errors = by_part(model.actual(policy, *setting), model.expected(Policy(policy.layers, n_sink)))
        ratio = min(error / model.floor(*setting)[part] for part, error in errors.items())
        print(f"n_sink {n_sink} for 4: error {ratio:.2g} times the floor")
        assert ratio > NOTICED_FACTOR


def test_token_by_token(random_hybrid):
    """No prefill at all: every token is decoded alone, and the rings turn over several times."""
    model, n_tokens = random_hybrid, 900
    positions = np.arange(0, n_tokens, 7)
    for name in ("different", "all 16", "more sinks than window"):
        policy = model.policies[name]
        expected = model.reference.logits(model.tokens[:n_tokens], policy.layers, policy.n_sink, positions)
        with model.runtime(policy).context(model.n_ctx, 32, *EXACT) as context:
            actual = context.run(model.tokens[:n_tokens], positions, n_prefill=1)
        error, floor = nmse(actual, expected), model.floor(*EXACT, 32)["decode"]
        print(f"{name}: NMSE {error:.1e}, {error / floor:.2f} times the full cache's")
        assert error < WINDOWED_FACTOR * floor


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    "windows, n_sink", [((16, 16, 16, 16), 0), ((16, 40, 300, 16), 0), ((16, 16, 16, 16), 4)], ids=str
)
def test_window_ends_exactly(tmp_path, windows, n_sink, flash):
    """In a one-layer model a token matters for the next w - 1 tokens, and not one bit beyond, whatever the batches; a
    sink token always."""
    path = str(tmp_path / "one-layer.gguf")
    random_models.write_llama(path, seed=3)
    tokens = np.random.default_rng(4).integers(0, 256, 620)
    reach = max(windows)
    positions = np.arange(len(tokens))
    with Runtime(path, Policy({0: windows}, n_sink), n_threads=1) as runtime:
        for chunk in (len(tokens), 1, 7, 16, 64):

            def logits(ids, chunk=chunk):
                with runtime.context(1024, 64, "f16", flash) as context:
                    assert max(group["cells"] for group in context.info()["groups"]) <= 512
                    return context.run(ids, positions, len(ids), chunk)

            before = logits(tokens)
            for changed in (0, 250, 590) if n_sink == 0 else (n_sink - 1, n_sink, 250):
                other = tokens.copy()
                other[changed] = (other[changed] + 1) % 256
                touched = np.flatnonzero((logits(other) != before).any(axis=1))
                wanted = range(changed, len(tokens) if changed < n_sink else min(changed + reach, len(tokens)))
                assert touched.tolist() == list(wanted), f"chunk {chunk}, token {changed}"


def test_needles(mini_hybrid):
    """The trained hybrid finds far facts through KV head 7.1 alone; with that head windowed as well it does not."""
    policies = {
        "full": None,
        "only 7.1 full": Policy({3: (64,) * 4, 7: (64, None, 64, 64)}),
        "all windowed": Policy({3: (64,) * 4, 7: (64,) * 4}),
    }
    prompts = [needle_prompt(seed, 1024, distance) for distance in (256, 512, 900) for seed in range(9)]
    right = {}
    for name, policy in policies.items():
        with Runtime(mini_hybrid, policy, n_threads=1) as runtime:
            right[name] = np.array([answer(runtime, prompt) == value for prompt, value in prompts])
    known = right.pop("full")
    assert known.mean() > 0.7  # the model confuses some keys by itself: look only at what it knows
    share = {name: answers[known].mean() for name, answers in right.items()}
    print(f"known: {known.mean():.2f}; of these", ", ".join(f"{name}: {value:.2f}" for name, value in share.items()))
    assert share["only 7.1 full"] >= 0.85
    assert share["all windowed"] <= 0.15


def answer(runtime, prompt):
    """Three tokens of greedy continuation, as text."""
    with runtime.context(1280, 128, "f16", True) as context:
        tokens = runtime.tokenize(prompt)
        digits = []
        for _ in range(3):
            logits = context.decode(tokens, [context.n_past + len(tokens) - 1])
            tokens = [int(logits[0].argmax())]
            digits += tokens
        return runtime.text(digits).strip()
