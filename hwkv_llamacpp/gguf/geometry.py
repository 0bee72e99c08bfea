"""Which layers of a model can take windows, and the shapes that decide what they cost.

The rules mirror what llama.cpp's load_hparams() and create_memory() do at the pinned
revision (src/models/*.cpp, src/llama-model.cpp); tests compare the result with the
runtime on every architecture. Each architecture is one row of ARCHITECTURES below.
Only the GGUF header is read: metadata-only files and any shard of a split model work.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..base.names import show
from ..errors import HwkvError
from .file import GGUFFile, open_first_shard

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
F16_BYTES = 2


@dataclass(frozen=True)
class Layer:
    """One block of the model, as the main context's memory sees it.

    kind is one of
      attention    global attention with its own KV: takes windows
      swa          sliding-window attention that the model was trained with
      recurrent    state-space, linear or convolution layer
      none         no KV: feed-forward only, or a next-token-prediction block
      reuse        attends to the KV of an earlier layer (source)
      unsupported  would be "attention", but the model as a whole is refused
    """

    layer: int
    kind: str
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    reason: str | None = None  # why it is not configurable; None for "attention"
    source: int | None = None  # of a "reuse" layer

    @property
    def n_gqa(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 0


@dataclass(frozen=True)
class ModelGeometry:
    architecture: str
    name: str
    n_layer: int  # every block, next-token-prediction blocks included
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_swa: int  # the model's own trained window, 0 without
    layers: tuple[Layer, ...]
    refusal: str | None = None  # why the model as a whole takes no policy

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> "ModelGeometry":
        """Geometry of a GGUF file or of any shard of a split one. HwkvError if it cannot be known."""
        file, _ = open_first_shard(path)
        with file:
            return _read_geometry(file)

    @property
    def configurable(self) -> tuple[Layer, ...]:
        """The layers that take windows, in execution order."""
        return tuple(layer for layer in self.layers if layer.kind == "attention")

    @property
    def kv_bytes_per_token(self) -> int:
        """F16 K and V bytes that one token costs in the configurable layers."""
        return sum(x.n_head_kv * (x.head_dim_k + x.head_dim_v) for x in self.configurable) * F16_BYTES

    @property
    def fingerprint(self) -> str:
        """64 hex digits, the same for every quantisation of a model."""
        lines = [
            f"hwkv-geometry 1 {self.architecture} n_layer={self.n_layer} n_embd={self.n_embd} "
            f"n_vocab={self.n_vocab} n_ctx_train={self.n_ctx_train}"
        ]
        lines += [f"{x.layer} {x.kind} {x.n_head} {x.n_head_kv} {x.head_dim_k} {x.head_dim_v}" for x in self.layers]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def warn_beyond(self, n_ctx: int, n_parallel: int = 1) -> None:
        """Says on stderr if n_ctx tokens for n_parallel slots are more than the model was trained for."""
        if n_ctx > self.n_ctx_train * n_parallel:
            print(
                f"warning: the context of {n_ctx} tokens is larger than the model was trained for ({self.n_ctx_train}):"
                " llama-server would cap its slots",
                file=sys.stderr,
            )

    def describe(self) -> dict[str, Any]:
        """The "model" object of a policy file."""
        return {
            "architecture": self.architecture,
            "name": self.name,
            "n_layer": self.n_layer,
            "fingerprint": self.fingerprint,
        }


# The table of architectures.
#
# swa: how sliding-window layers are told
#   Period(n, ...)  unless the file has a pattern of its own, every n-th layer is dense and the others slide
#   LISTED          the file must list them in attention.sliding_window_pattern
#   ATTENTION       all layers that are not recurrent, if the file gives a window
# recurrent: how recurrent layers are told
#   ALL             every layer
#   NO_KV_HEADS     layers whose head_count_kv is 0
#   Interval(n)     attention.recurrent_layers, or all but every full_attention_interval-th (n by default)
#   NEMOTRON_H      as NO_KV_HEADS; layers with a feed-forward length hold neither KV nor state
#   PARALLEL        every layer has both: a recurrent half, and attention with its own KV

LISTED, ATTENTION = "listed", "attention"
ALL, NO_KV_HEADS, NEMOTRON_H, PARALLEL = "all", "no_kv_heads", "nemotron_h", "parallel"


@dataclass(frozen=True)
class Period:
    """Sliding windows on all but every n-th layer."""

    n: int
    dense_first: bool = False  # the dense layer opens the period instead of closing it
    optional: bool = False  # no sliding_window key, or 0: every layer is dense
    window: int | None = None  # used when the file gives none (or always, with fixed)
    fixed: bool = False  # the window in the file only switches
    n_layer: int | None = None  # slides only in the model of this many layers
    default_on: bool = False  # with optional: a missing key means on, only 0 means off


@dataclass(frozen=True)
class Interval:
    n: int


@dataclass(frozen=True)
class Arch:
    swa: Period | str | None = None
    recurrent: Interval | str | None = None
    mla: bool = False  # reads the multi-head latent attention keys
    # layers from this one on reuse earlier KV; "shared": told by the file
    n_layer_kv: int | Literal["shared"] | None = None
    alibi: bool | int | str = False  # True: always; a number: with that many layers; "key": told by the file
    loops: bool = False  # num_loops repeats the stack, each repeat with its own KV
    refusal: str | None = None  # why the whole model takes no policy


ENCODER = Arch(refusal="its attention is not causal, so it keeps no KV cache")
DRAFT = Arch(refusal="it is a draft model that reads the cache of its target")
SPARSE = "its sparse attention keeps an index of its own beside the KV cache"

ARCHITECTURES = {
    # every layer is global attention
    **dict.fromkeys(
        (
            "apertus",
            "arcee",
            "arctic",
            "bailingmoe",
            "bailingmoe2",
            "bitnet",
            "chameleon",
            "chatglm",
            "codeshell",
            "cogvlm",
            "command-r",
            "dbrx",
            "deci",
            "deepseek",
            "deepseek2-ocr",
            "dots1",
            "ernie4_5",
            "ernie4_5-moe",
            "exaone",
            "falcon",
            "gemma",
            "glm4",
            "glm4moe",
            "gpt2",
            "gptneox",
            "granite",
            "granitemoe",
            "grok",
            "grovemoe",
            "hrm_text",
            "hunyuan-dense",
            "hunyuan-moe",
            "hunyuan_vl",
            "hy_v3",
            "internlm2",
            "jais2",
            "llama",
            "llama-embed",
            "maincoder",
            "minicpm",
            "minicpm3",
            "minimax-m2",
            "mistral3",
            "nemotron",
            "olmo",
            "olmoe",
            "openelm",
            "orion",
            "paddleocr",
            "pangu-embedded",
            "phi2",
            "phi3",
            "phimoe",
            "plamo",
            "plm",
            "pockettts",
            "qwen",
            "qwen2",
            "qwen2moe",
            "qwen2vl",
            "qwen3",
            "qwen3moe",
            "qwen3tts",
            "qwen3vl",
            "qwen3vlmoe",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder",
            "starcoder2",
            "talkie",
            "xverse",
        ),
        Arch(),
    ),
    "nanbeige": Arch(loops=True),
    # sliding windows on most layers
    "afmoe": Arch(swa=Period(4, optional=True)),
    "cohere2": Arch(swa=Period(4)),
    "cohere2moe": Arch(swa=Period(4, dense_first=True)),
    "exaone-moe": Arch(swa=Period(4)),
    "exaone4": Arch(swa=Period(4, window=4096, n_layer=64)),
    "gemma2": Arch(swa=Period(2, window=4096)),
    "gemma3": Arch(swa=Period(6, optional=True)),
    "gemma3n": Arch(swa=Period(5), n_layer_kv=20),
    "gemma4": Arch(swa=LISTED, n_layer_kv="shared"),
    "gpt-oss": Arch(swa=Period(2)),
    "granite_swa": Arch(swa=LISTED),
    "laguna": Arch(swa=Period(4, dense_first=True, optional=True)),
    "llama4": Arch(swa=Period(4, optional=True, default_on=True, window=8192, fixed=True)),
    "maple": Arch(swa=LISTED),
    "mellum": Arch(swa=Period(4, optional=True)),
    "mimo2": Arch(swa=LISTED),
    "muse-glimmer": Arch(swa=Period(4)),
    "olmo2": Arch(swa=Period(4, optional=True)),
    "plamo3": Arch(swa=Period(8, optional=True)),
    "smallthinker": Arch(swa=Period(4, dense_first=True, optional=True, window=4096, fixed=True)),
    "spark2_5": Arch(swa=LISTED),
    "step35": Arch(swa=LISTED),
    # recurrent layers between attention layers
    "falcon-h1": Arch(recurrent=PARALLEL),
    "granitehybrid": Arch(recurrent=NO_KV_HEADS),
    "jamba": Arch(recurrent=NO_KV_HEADS),
    "lfm2": Arch(recurrent=NO_KV_HEADS, swa=ATTENTION),
    "lfm2moe": Arch(recurrent=NO_KV_HEADS),
    "minimax-01": Arch(recurrent=Interval(8)),
    "nemotron_h": Arch(recurrent=NEMOTRON_H),
    "nemotron_h_moe": Arch(recurrent=NEMOTRON_H),
    "plamo2": Arch(recurrent=NO_KV_HEADS),
    "qwen35": Arch(recurrent=Interval(4)),
    "qwen35moe": Arch(recurrent=Interval(4)),
    "qwen3next": Arch(recurrent=Interval(4)),
    # recurrent layers only
    **dict.fromkeys(("arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"), Arch(recurrent=ALL)),
    # latent attention where the file has its keys: one latent per token instead of KV heads
    "bailingmoe3": Arch(recurrent=NO_KV_HEADS, mla=True),
    "deepseek2": Arch(mla=True),
    "kimi-k3": Arch(recurrent=NO_KV_HEADS, mla=True),
    "kimi-linear": Arch(recurrent=NO_KV_HEADS, mla=True),
    "mistral4": Arch(mla=True),
    # positions as biases whose slope follows the head's index
    "baichuan": Arch(alibi=40),
    "bloom": Arch(alibi=True),
    "jais": Arch(alibi="key"),
    "mpt": Arch(alibi="key"),
    "refact": Arch(alibi=True),
    # refused whatever the file says
    **dict.fromkeys(
        (
            "bert",
            "dream",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "llada",
            "llada-moe",
            "modern-bert",
            "neo-bert",
            "nomic-bert",
            "nomic-bert-moe",
            "rnd1",
            "wavtokenizer-dec",
        ),
        ENCODER,
    ),
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), DRAFT),
    **dict.fromkeys(
        ("t5", "t5encoder"),
        Arch(refusal="its decoder adds position buckets and cross attention to the KV cache's attention"),
    ),
    "deepseek32": Arch(refusal=SPARSE),
    "deepseek4": Arch(refusal=SPARSE),
    "dots3note": Arch(refusal=SPARSE),
    "glm-dsa": Arch(refusal=SPARSE),
    "glm5-next": Arch(recurrent=NO_KV_HEADS, refusal=SPARSE),
    "hy_v4": Arch(refusal=SPARSE),
    "minimax-m3": Arch(refusal=SPARSE),
    "qwen4exp": Arch(recurrent=Interval(4), refusal=SPARSE),
    "graniteswitch": Arch(refusal="one of its cache layers carries a routing signal instead of attention"),
    "clip": Arch(refusal="it is an image encoder, not a language model"),
    "gptj": Arch(refusal="llama.cpp has a name for it, but cannot run it"),
}


class Keys:
    """Typed access to the keys of one architecture, with llama.cpp's rules for scalars and arrays."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def number(self, name: str, default: int | None = None) -> int:
        """A non-negative integer. Without a default the key is required."""
        key, value = self._get(name)
        if value is None:
            if default is None:
                raise HwkvError(f"{self.file.path}: key '{key}' is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise HwkvError(f"{self.file.path}: key '{key}' is {show(value)}, a non-negative integer expected")
        return value

    def real(self, name: str) -> float:
        value = self._get(name)[1]
        return value if isinstance(value, float) else 0.0

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)[1]
        return value if isinstance(value, bool) else default

    def per_layer(self, name: str, n: int, default: int = 0) -> list[int]:
        """n numbers: an array of exactly n, or one number for all; `default` for all without the key."""
        key, value = self._get(name)
        if not isinstance(value, list):
            return [self.number(name, default)] * n
        if len(value) != n:
            raise HwkvError(
                f"{self.file.path}: key '{key}' has {len(value)} values, one for each of {n} blocks expected"
            )
        return self._numbers(key, value)

    def pattern(self, name: str, n: int, required: bool = False) -> list[bool] | None:
        """n booleans from an array of any length (missing ones are false), or None without an array."""
        key, value = self._get(name)
        if not isinstance(value, list):
            if required:
                raise HwkvError(f"{self.file.path}: key '{key}' is missing, an array expected")
            return None
        flags = [bool(x) for x in self._numbers(key, value)]
        return (flags + [False] * n)[:n]

    def has(self, name: str) -> bool:
        return self._get(name)[1] is not None

    def _get(self, name: str) -> tuple[str, Any]:
        key = f"{self.architecture}.{name}"
        return key, self.file.get(key)

    def _numbers(self, key: str, values: list[Any]) -> list[int]:
        if not all(isinstance(x, int) and 0 <= x < 2**32 for x in values):
            raise HwkvError(f"{self.file.path}: key '{key}' holds something else than non-negative integers")
        return values


def _read_geometry(file: GGUFFile) -> ModelGeometry:
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        what = "missing" if architecture is None else show(architecture)
        raise HwkvError(f"{file.path}: key 'general.architecture' is {what}, a text expected")
    arch = ARCHITECTURES.get(architecture)
    if arch is None:
        raise HwkvError(f"{file.path}: architecture {show(architecture)} is not known to this version")
    keys = Keys(file, architecture)

    if architecture == "clip":  # has none of the keys below
        return ModelGeometry(architecture, _name(file), 0, 0, 0, 0, 0, (), arch.refusal)

    n_ctx_train = keys.number("context_length")
    n_embd = keys.number("embedding_length")
    n_all = keys.number("block_count")
    n_nextn = keys.number("nextn_predict_layers", 0)
    if not 0 < n_all <= MAX_LAYERS or n_nextn > n_all:
        raise HwkvError(
            f"{file.path}: key '{architecture}.block_count' is {n_all}"
            f" ({n_nextn} of them for next-token prediction), 1 to {MAX_LAYERS} expected"
        )
    n_layer = n_all - n_nextn

    n_head = keys.per_layer("attention.head_count", n_all)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_all) if keys.has("attention.head_count_kv") else n_head
    n_ff = keys.per_layer("feed_forward_length", n_all)
    dims = _head_dims(keys, architecture, n_embd, n_head)

    swa, n_swa = _sliding_layers(keys, arch.swa, n_layer, n_all)
    recurrent = _recurrent_layers(keys, arch.recurrent, n_layer, n_all, n_head_kv, n_ff)
    if arch.swa == ATTENTION and n_swa:
        swa = [il < n_layer and not recurrent[il] for il in range(n_all)]

    if arch.loops and (n_loops := keys.number("num_loops", 1)) > 1:
        if n_layer * n_loops > MAX_LAYERS:
            raise HwkvError(f"{file.path}: {n_layer} layers repeated {n_loops} times are more than {MAX_LAYERS}")
        n_head, n_head_kv, n_ff, swa, recurrent = (
            x[:n_layer] * n_loops for x in (n_head, n_head_kv, n_ff, swa, recurrent)
        )
        n_all = n_layer * n_loops
        n_layer = n_all - n_nextn
    n_main = n_layer or n_all  # a file of next-token-prediction blocks only attends to them

    n_layer_kv: int | None
    if arch.n_layer_kv == "shared":
        n_layer_kv = n_all - keys.number("attention.shared_kv_layers", 0)
    else:
        n_layer_kv = arch.n_layer_kv
    if n_layer_kv is not None and n_layer_kv < 2:
        raise HwkvError(
            f"{file.path}: key '{architecture}.attention.shared_kv_layers' leaves {max(n_layer_kv, 0)} layers"
            " with KV of their own, at least 2 expected"
        )

    refusal = arch.refusal or _refusal(keys, arch, n_layer)

    layers = []
    for il in range(n_all):
        kind, reason, source = "attention", None, None
        if il >= n_main:
            kind, reason = "none", "it predicts the token after next and is not part of the main context"
        elif n_layer_kv is not None and il >= n_layer_kv:
            source = n_layer_kv - (2 if swa[il] else 1)
            kind, reason = "reuse", f"it reuses the KV of layer {source}"
        elif recurrent[il] and arch.recurrent != PARALLEL:
            kind, reason = "recurrent", "it is recurrent and keeps a state instead of KV"
        elif arch.recurrent == NEMOTRON_H and n_ff[il]:
            kind, reason = "none", "it has no attention"
        elif n_head_kv[il] == 0:
            kind, reason = "none", "it has no KV heads"
        elif swa[il]:
            kind, reason = "swa", f"it has the model's own sliding window of {n_swa} tokens"
        if kind == "attention" and refusal:
            kind, reason = "unsupported", refusal
        head_dim_k, head_dim_v = dims[swa[il]]
        layers.append(Layer(il, kind, n_head[il], n_head_kv[il], head_dim_k, head_dim_v, reason, source))
    if not refusal and not any(layer.kind == "attention" for layer in layers):
        refusal = "it has no layer with global attention"

    return ModelGeometry(
        architecture, _name(file), n_all, n_embd, _n_vocab(file, keys), n_ctx_train, n_swa, tuple(layers), refusal
    )


def _head_dims(keys: Keys, architecture: str, n_embd: int, n_head: list[int]) -> dict[bool, tuple[int, int]]:
    """{is_swa: (head_dim_k, head_dim_v)}"""
    k = v = 0
    if n_head[0] > 0:
        k = keys.number("attention.key_length", n_embd // n_head[0])
        v = keys.number("attention.value_length", n_embd // n_head[0])
    elif architecture == "plamo2":  # reads them again
        k, v = keys.number("attention.key_length", 0), keys.number("attention.value_length", 0)
    return {
        False: (k, v),
        True: (keys.number("attention.key_length_swa", k), keys.number("attention.value_length_swa", v)),
    }


def _sliding_layers(keys, rule, n_layer, n_all):
    """(is_swa of every block, window; 0 without)"""
    dense = [False] * n_all
    if rule is None:
        return dense, 0
    if rule == ATTENTION:
        return dense, keys.number("attention.sliding_window", 0)  # the caller knows the recurrent layers
    if rule == LISTED:
        return (
            keys.pattern("attention.sliding_window_pattern", n_all, required=True),
            keys.number("attention.sliding_window"),
        )

    n_swa = keys.number("attention.sliding_window", 0 if rule.optional else rule.window)
    on = n_layer == rule.n_layer if rule.n_layer else not rule.optional or n_swa > 0
    if rule.default_on and not keys.has("attention.sliding_window"):
        on = True
    if not on:
        return dense, 0
    if rule.fixed:
        n_swa = rule.window

    listed = keys.pattern("attention.sliding_window_pattern", n_all)
    if listed is not None:
        return listed, n_swa
    n = keys.number("attention.sliding_window_pattern", rule.n)
    dense_at = 0 if rule.dense_first else n - 1
    return [il < n_layer and (n == 0 or il % n != dense_at) for il in range(n_all)], n_swa


def _recurrent_layers(keys, rule, n_layer, n_all, n_head_kv, n_ff):
    """is_recurrent of every block"""
    if rule is None:
        return [False] * n_all
    if rule in (ALL, PARALLEL):
        return [True] * n_all
    if rule == NO_KV_HEADS:
        return [il < n_layer and n_head_kv[il] == 0 for il in range(n_all)]
    if rule == NEMOTRON_H:
        return [il < n_layer and n_head_kv[il] == 0 and n_ff[il] == 0 for il in range(n_all)]
    if keys.has("attention.recurrent_layers"):
        return [bool(x) for x in keys.per_layer("attention.recurrent_layers", n_all)]
    interval = keys.number("full_attention_interval", rule.n)
    if interval == 0:
        raise HwkvError(f"{keys.file.path}: key '{keys.architecture}.full_attention_interval' is 0")
    return [il < n_layer and (il + 1) % interval != 0 for il in range(n_all)]


def _refusal(keys: Keys, arch: Arch, n_layer: int) -> str | None:
    """Why the model as a whole takes no policy, or None."""
    if arch.mla and keys.number("attention.key_length_mla", 0) and keys.number("attention.value_length_mla", 0):
        return "its latent attention (MLA) keeps one latent per token instead of KV heads"
    alibi = {True: True, False: False, "key": keys.real("attention.max_alibi_bias") > 0}.get(
        arch.alibi, n_layer == arch.alibi
    )
    if alibi:
        return "its ALiBi slopes follow the head's index, which grouped attention changes"
    if not keys.flag("attention.causal", True):
        return "its attention is not causal"
    if arch.recurrent == ALL:
        return "it is recurrent and keeps no KV cache"
    return None


def _name(file: GGUFFile) -> str:
    name = file.get("general.name")
    return name if isinstance(name, str) else Path(file.path).stem


def _n_vocab(file: GGUFFile, keys: Keys) -> int:
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is not None and tokens.is_array:
        return tokens.length
    return keys.number("vocab_size", 0)
