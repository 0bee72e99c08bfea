"""Predicted KV bytes: by hand, and against what the runtime allocates."""

import itertools
import re

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.policy.footprint import CACHE_TYPES, predict, row_bytes

MIB = 2**20


@pytest.fixture
def geometry(metadata_gguf):
    """Two layers of 4 KV heads of 64."""
    return ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {"block_count": 2, "embedding_length": 512, "attention.head_count": 8, "attention.head_count_kv": 4},
        )
    )


def shapes(footprint):
    return [(g.window, g.cells, g.streams, g.heads, g.bytes) for g in footprint.groups]


# bytes of one token of one head of 64, K or V
ROW_64 = {"f32": 256, "f16": 128, "bf16": 128, "q8_0": 68, "q4_0": 36, "q4_1": 40, "iq4_nl": 36, "q5_0": 44, "q5_1": 48}


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_row_bytes(cache_type):
    assert row_bytes(cache_type, 64) == ROW_64[cache_type]
    assert row_bytes(cache_type, 3 * 64) == 3 * ROW_64[cache_type]


def test_full(geometry):
    footprint = predict(geometry, None, 4096)
    assert shapes(footprint) == [(None, 4096, 1, 8, 4096 * 2 * 4 * 2 * 128)]
    assert footprint.kv_bytes == footprint.full_kv_bytes == 8 * MIB
    assert not footprint.active


def test_windows(geometry):
    """w + n_ubatch, padded to 256 cells; heads of one window are one group over all layers."""
    policy = Policy({0: [None, 512, 512, 100], 1: [100, 100, 100, 100]})
    footprint = predict(geometry, policy, 4096, n_ubatch=512)
    token = 2 * 128
    assert shapes(footprint) == [
        (None, 4096, 1, 1, 4096 * token),
        (100, 768, 1, 5, 768 * 5 * token),
        (512, 1024, 1, 2, 1024 * 2 * token),
    ]
    assert footprint.active
    assert [(il, heads) for il, heads, _ in footprint.groups[1].layers] == [(0, 1), (1, 4)]
    assert footprint.to_dict()["groups"][1] == {
        "window": 100,
        "cells": 768,
        "streams": 1,
        "heads": 5,
        "bytes": 768 * 5 * token,
        "layers": [{"layer": 0, "heads": 1, "bytes": 768 * token}, {"layer": 1, "heads": 4, "bytes": 768 * 4 * token}],
    }


def test_windows_as_long_as_the_context_are_full(geometry):
    policy = Policy({0: [1024, 1023, 5000, None]})
    footprint = predict(geometry, policy, 1000)  # padded to 1024
    assert footprint.n_ctx == 1024
    assert shapes(footprint)[0][3] == 3 + 4
    assert shapes(footprint)[1][:2] == (1023, 1024)
    assert not predict(geometry, Policy({0: [1024] * 4}), 1000).active


def test_windows_that_reach_the_sink_tokens_are_full(geometry):
    """The last query, at 1023, sees 1023 - w + 1 and later, and 0 to n_sink - 1: nothing is between them if w + n_sink
    = 1024."""
    footprint = predict(geometry, Policy({0: [1020, 1019, 1, 1]}, n_sink=4), 1024)
    assert [(window, heads) for window, _, _, heads, _ in shapes(footprint)] == [(None, 1 + 4), (1, 2), (1019, 1)]
    assert not predict(geometry, Policy({0: [1] * 4}, n_sink=1023), 1024).active
    assert not predict(geometry, Policy({0: [1] * 4}, n_sink=2**31 - 1), 1024).active


@pytest.mark.parametrize(
    ("n_sink", "options", "cells"),
    [
        (0, {}, 1024),
        (4, {}, 1280),  # 512 + 4 + 512
        (256, {}, 1280),
        (4, {"n_ubatch": 64}, 768),
        (64, {"n_seq_max": 4}, 1280),  # split: each ring has its own
        (64, {"n_seq_max": 4, "unified": True}, 3072),  # (512 + 64 + 64) * 4 + 512
    ],
)
def test_cells_for_sink_tokens(geometry, n_sink, options, cells):
    assert predict(geometry, Policy({0: [512] * 4}, n_sink), 8192, **options).groups[1].cells == cells


@pytest.mark.parametrize(
    ("options", "cells", "streams"),
    [
        ({"n_ctx": 8192, "n_seq_max": 4}, 1280, 4),  # split: each of 2048 cells, its own ring, with room for drafts
        (
            {"n_ctx": 8192, "n_seq_max": 4, "unified": True},
            2816,
            1,
        ),  # unified: one ring that holds every sequence's window
        ({"n_ctx": 8192, "n_seq_max": 1, "unified": True}, 1024, 1),
        ({"n_ctx": 8192, "n_ubatch": 64}, 768, 1),
        ({"n_ctx": 8192, "n_ubatch": 2048}, 2560, 1),
        ({"n_ctx": 8192, "n_batch": 128}, 768, 1),  # a ubatch is never longer than a batch
        ({"n_ctx": 8192, "n_ubatch": 0}, 2560, 1),  # 0: as long as a batch
        ({"n_ctx": 1000, "n_batch": 4096, "n_ubatch": 4096}, 1024, 1),  # a batch never longer than the context
        ({"n_ctx": 0}, 1024, 1),  # the trained context
    ],
)
def test_cells(geometry, options, cells, streams):
    group = predict(geometry, Policy({0: [512] * 4}), **options).groups[1]
    assert (group.cells, group.streams) == (cells, streams)


def test_context_split_unevenly(geometry):
    footprint = predict(geometry, None, 4096, n_seq_max=3)
    assert (footprint.n_ctx_seq, footprint.n_ctx) == (1536, 4608)


def test_types_and_head_sizes(metadata_gguf):
    geometry = ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {"block_count": 1, "attention.head_count": 4, "attention.key_length": 192, "attention.value_length": 128},
        )
    )
    footprint = predict(geometry, None, 256, type_k="q8_0", type_v="q4_0")
    assert footprint.kv_bytes == 256 * (4 * 192 // 32 * 34 + 4 * 128 // 32 * 18)


def test_without_flash_attention_v_rows_are_padded_to_the_groups_widest(geometry):
    policy = Policy({0: [512, None, None, None], 1: [512, 512, 512, None]})
    flash, plain = (predict(geometry, policy, 4096, flash_attn=fa) for fa in (True, False))
    k = v = 128
    assert [g.bytes for g in flash.groups] == [4096 * 4 * (k + v), 1024 * 4 * (k + v)]
    assert [g.bytes for g in plain.groups] == [4096 * (4 * k + 2 * 3 * v), 1024 * (4 * k + 2 * 3 * v)]
    assert plain.full_kv_bytes == flash.full_kv_bytes


def test_models_from_the_field(metadata_gguf):
    lfm2 = ModelGeometry.from_gguf(
        metadata_gguf(
            "lfm2",
            {
                "block_count": 16,
                "embedding_length": 2048,
                "attention.head_count": 32,
                "attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0],
            },
        )
    )
    assert predict(lfm2, None, 32768).kv_bytes == 384 * MIB
    mamba = ModelGeometry.from_gguf(metadata_gguf("mamba", {"attention.head_count": 0}))
    assert predict(mamba, None, 32768).kv_bytes == predict(mamba, None, 32768).full_kv_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"type_k": "q6_k"},
            "cache type 'q6_k' is unknown; known are f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1",
        ),
        ({"n_ctx": -1}, "n_ctx is -1, 1 to 2147483647 expected"),
        ({"n_seq_max": 0}, "n_seq_max is 0, 1 to 256 expected"),
        ({"n_batch": 0}, "n_batch is 0, 1 to 2147483647 expected"),
    ],
)
def test_bad_arguments(geometry, options, message):
    with pytest.raises(HwkvError) as caught:
        predict(geometry, None, **options)
    assert str(caught.value) == message


def test_block_size_must_divide_the_rows(metadata_gguf):
    geometry = ModelGeometry.from_gguf(
        metadata_gguf(
            "llama",
            {
                "attention.head_count": 4,
                "attention.head_count_kv": 1,
                "attention.key_length": 40,
                "attention.value_length": 40,
            },
        )
    )
    with pytest.raises(HwkvError, match="cache type q8_0 stores blocks of 32 values, which does not divide rows of 40"):
        predict(geometry, None, type_k="q8_0")


# against the runtime


@pytest.fixture(scope="module")
def native():
    from hwkv_llamacpp.runtime import native

    try:
        native.library()
    except HwkvError as error:
        pytest.skip(str(error))
    native.load()
    return native


GGML_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
POLICIES = {
    "mini_hybrid": [Policy({3: [None, 16, 512, 16], 7: [512, 512, 512, 700]}, n_sink) for n_sink in (0, 1, 4, 64, 600)],
    "gemma3": [Policy({5: [300], 17: [1000]}, n_sink) for n_sink in (0, 24)],
    "smollm2": [Policy({0: [64, None, 64], 7: [64, 512, 2000], 29: [512, 512, 512]}, n_sink) for n_sink in (0, 4)],
}
CONTEXTS = [
    {"n_ctx": 4096},
    {"n_ctx": 3000, "n_ubatch": 32, "type_k": "q8_0", "type_v": "q8_0"},
    {"n_ctx": 4096, "n_batch": 1024, "n_ubatch": 1024, "n_seq_max": 3},
    {"n_ctx": 4096, "n_ubatch": 64, "n_seq_max": 4, "unified": True},
    {"n_ctx": 4096, "flash_attn": False},
    {"n_ctx": 2048, "n_seq_max": 2, "flash_attn": False, "type_k": "q4_0"},
    *({"n_ctx": 1024, "type_k": name, "type_v": name, "n_ubatch": 16} for name in CACHE_TYPES),
]


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for name in POLICIES for policy in POLICIES[name]],
    ids=lambda x: x if isinstance(x, str) else f"n_sink {x.n_sink}",
)
def test_the_runtime_allocates_what_is_predicted(name, policy, request, native):
    """Every group's cells, heads and bytes, to the byte."""
    import llama_cpp

    path = request.getfixturevalue(name)
    geometry = ModelGeometry.from_gguf(path)
    model = load_model(native, path, policy)
    try:
        for options in CONTEXTS:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = options["n_ctx"]
            params.n_batch = options.get("n_batch", 2048)
            params.n_ubatch = options.get("n_ubatch", 512)
            params.n_seq_max = options.get("n_seq_max", 1)
            params.kv_unified = options.get("unified", False)
            params.flash_attn_type = 1 if options.get("flash_attn", True) else 0
            params.type_k = GGML_TYPES[options.get("type_k", "f16")]
            params.type_v = GGML_TYPES[options.get("type_v", "f16")]
            context = llama_cpp.llama_init_from_model(model, params)
            assert context, options
            try:
                info = native.info(context)
            finally:
                llama_cpp.llama_free(context)
            footprint = predict(geometry, policy, **options)
            predicted = footprint.to_dict()
            assert info["active"] and info["fingerprint"] == policy.fingerprint(geometry.n_layer)
            assert (info["kv_bytes"], info["full_kv_bytes"]) == (predicted["kv_bytes"], predicted["full_kv_bytes"]), (
                options
            )
            assert by_window(info["groups"]) == by_window(predicted["groups"]), options
    finally:
        llama_cpp.llama_model_free(model)


# a sliding-window model and a dense one: windows that are rings at every context, and one that is full at the shortest
GRID_POLICIES = {"gemma3": Policy({5: [100], 11: [700]}), "smollm2": Policy({0: [64, None, 100], 7: [700, 700, 16]})}


@pytest.mark.parametrize("windowed", [True, False], ids=["policy", "full KV"])
@pytest.mark.parametrize("name", GRID_POLICIES)
def test_every_cache_of_the_grid_is_predicted(name, windowed, request, native):
    """Cells and bytes of every cache, the model's own sliding windows included, over contexts, slots, micro-batches and
    types."""
    import llama_cpp

    path, policy = request.getfixturevalue(name), GRID_POLICIES[name] if windowed else None
    geometry = ModelGeometry.from_gguf(path)
    assert (geometry.n_swa > 0) == (name == "gemma3")
    model = load_model(native, path, policy or Policy(), no_alloc=True)
    n_contexts = 0
    try:
        for n_ctx, n_seq_max, unified, n_ubatch, cache_type in itertools.product(
            (1000, 1024, 3900), (1, 2, 3, 4, 9), (False, True), (64, 512), ("f16", "q8_0")
        ):
            options = {"n_ubatch": n_ubatch, "n_seq_max": n_seq_max, "unified": unified}
            options |= {"type_k": cache_type, "type_v": cache_type}
            caches, info = made_caches(native, llama_cpp, model, n_ctx, **options)
            footprint = predict(geometry, policy, n_ctx, **options)
            assert caches == predicted_caches(footprint), (n_ctx, options)
            assert info["active"] == footprint.active == windowed, (n_ctx, options)
            if windowed:
                assert info["kv_bytes"] == footprint.kv_bytes, (n_ctx, options)
            n_contexts += 1
    finally:
        llama_cpp.llama_model_free(model)
    assert n_contexts == 120


def test_every_sliding_window_architecture_is_predicted(random_models, native):
    """Also without FlashAttention, where rows of V are padded to the widest layer."""
    import llama_cpp

    tried = set()
    for path in random_models:
        geometry = ModelGeometry.from_gguf(path)
        if geometry.refusal or not any(layer.kind == "swa" for layer in geometry.layers):
            continue
        last = geometry.configurable[-1]
        policy = Policy({last.layer: [20] * last.n_head_kv})
        model = load_model(native, path, policy, no_alloc=True)
        try:
            for arm in (policy, None):
                native.select(model, arm)
                for n_seq_max, unified, flash_attn in itertools.product((1, 3), (False, True), (False, True)):
                    options = {"n_ubatch": 64, "n_seq_max": n_seq_max, "unified": unified, "flash_attn": flash_attn}
                    caches, info = made_caches(native, llama_cpp, model, 2048, **options)
                    footprint = predict(geometry, arm, 2048, **options)
                    assert caches == predicted_caches(footprint), (path.name, arm, options)
                    assert info["active"] == (arm is not None)
        finally:
            llama_cpp.llama_model_free(model)
        tried.add(geometry.architecture)
    assert len(tried) >= 10


def made_caches(native, llama_cpp, model, n_ctx, **options):
    """(every cache of a context as llama.cpp logs it: (cells, layers, MiB), what the runtime tells of a grouped one)"""
    from hwkv_llamacpp.runtime import llama_log

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_ubatch, params.n_seq_max = n_ctx, options["n_ubatch"], options["n_seq_max"]
    params.kv_unified, params.swa_full = options["unified"], False
    params.flash_attn_type = 1 if options.get("flash_attn", True) else 0
    params.type_k, params.type_v = (GGML_TYPES[options.get(name, "f16")] for name in ("type_k", "type_v"))
    with llama_log.texts() as logged:
        context = llama_cpp.llama_init_from_model(model, params)
    assert context, llama_log.reason(logged)
    try:
        info = native.info(context)
    finally:
        llama_cpp.llama_free(context)
    log = "".join(logged)
    found = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers", log)
    return sorted((int(cells), int(layers), mib) for mib, cells, layers in found), info


def predicted_caches(footprint):
    """The same of a Footprint. Cells and layers are exact there, so a MiB rounded to 0.01 tells the row's bytes."""
    groups = [*footprint.groups, *([footprint.own_windows] if footprint.own_windows else [])]
    return sorted((group.cells, len(group.layers), f"{group.bytes / MIB:.2f}") for group in groups)


def by_window(groups):
    return {
        g["window"]: (
            g["cells"],
            g["streams"],
            g["heads"],
            g["bytes"],
            sorted((x["layer"], x["heads"], x["bytes"]) for x in g["layers"]),
        )
        for g in groups
    }


def load_model(native, path, policy, no_alloc=False):
    import llama_cpp

    overrides = (llama_cpp.llama_model_kv_override * 2)()
    overrides[0].tag = 3  # string
    overrides[0].key = b"hwkv.policy"
    overrides[0].value.val_str = native.register(policy.to_json()).encode()
    params = llama_cpp.llama_model_default_params()
    params.kv_overrides = overrides
    params.n_gpu_layers = 0
    if no_alloc:
        params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    return model


@pytest.mark.parametrize("name", POLICIES)
def test_geometry_agrees_with_the_runtime(name, request, native):
    import llama_cpp

    path = request.getfixturevalue(name)
    geometry = ModelGeometry.from_gguf(path)
    model = load_model(native, path, Policy())
    try:
        theirs = native.layers(model)
    finally:
        llama_cpp.llama_model_free(model)
    assert theirs["architecture"] == geometry.architecture
    assert bool(theirs["refusal"]) == bool(geometry.refusal)
    assert [
        (x["layer"], x["kind"], x["n_head"], x["n_head_kv"], x["head_dim_k"], x["head_dim_v"]) for x in theirs["layers"]
    ] == [(x.layer, x.kind, x.n_head, x.n_head_kv, x.head_dim_k, x.head_dim_v) for x in geometry.layers]
