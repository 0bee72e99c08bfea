// Tests of the grouped KV cache on small models, such as those that test-llama-archs saves with -o DIR
//
//   test-hwkv archs DIR|MODEL    every architecture: windowed rings against rings of full size with the same masks, and the
//                                grouped path with windows that mask nothing against upstream's own path; or refused, with the reason
//                                besides the files, models that this program makes itself: made:gemma4 (layers that attend
//                                an earlier layer's K and V), made:llama (8 KV heads), made:qwen35 (4 KV heads)
//   test-hwkv walk  MODEL [...]  a random walk of sequence operations: whenever one claims success, the next logits are
//                                those of a fresh run
//   test-hwkv drafts MODEL [...] draft tokens that are taken back, on two to four sequences, where the rings are tight
//   test-hwkv training MODEL     is refused under a policy
//
// -ngl N for N layers on the device of a GPU build: the models, their KV and their states lie in its memory

#include "../src/llama-ext.h"
#include "../vendor/nlohmann/json.hpp"
#include "ggml-cpp.h"
#include "ggml-opt.h"
#include "ggml.h"
#include "gguf.h"
#include "llama-cpp.h"
#include "llama-hwkv-cpp.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

using json = nlohmann::ordered_json;

static std::string last_error;  // from the log

#define REQUIRE(cond, ...)                                                        \
    do {                                                                          \
        if (!(cond)) {                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);            \
            fprintf(stderr, __VA_ARGS__);                                         \
            fprintf(stderr, "\nlast error in the log: %s\n", last_error.c_str()); \
            exit(1);                                                              \
        }                                                                         \
    } while (0)

static double nmse(const std::vector<float> & a, const std::vector<float> & b) {
    double err = 0.0;
    double ref = 0.0;

    for (size_t i = 0; i < a.size(); ++i) {
        err += (a[i] - b[i]) * (a[i] - b[i]);
        ref += b[i] * b[i];
    }

    // also false for NaN
    return ref > 0.0 && err <= 1e30 ? err / ref : INFINITY;
}

//
// models and contexts
//

// models that test-llama-archs does not make
static const char * const MADE[] = { "made:gemma4", "made:llama", "made:qwen35" };

static gguf_context_ptr make_metadata(const std::string & arch) {
    gguf_context_ptr gguf(gguf_init_empty());

    const auto set = [&](const std::string & key, uint32_t value) {
        gguf_set_val_u32(gguf.get(), (arch + "." + key).c_str(), value);
    };

    const uint32_t n_vocab = 128;
    const bool     gemma4  = arch == "gemma4";
    const bool     qwen35  = arch == "qwen35";
    const uint32_t n_head  = gemma4 ? 4 : 8;

    gguf_set_val_str(gguf.get(), "general.architecture", arch.c_str());
    gguf_set_val_f32(gguf.get(), (arch + ".attention.layer_norm_rms_epsilon").c_str(), 1e-5f);

    set("vocab_size", n_vocab);
    set("context_length", 4096);
    set("embedding_length", 256);
    set("feed_forward_length", 256);
    set("block_count", gemma4 ? 10 : qwen35 ? 4 : 3);
    set("attention.head_count", n_head);
    set("attention.head_count_kv", gemma4 ? 2 : qwen35 ? 4 : 8);
    set("attention.key_length", 64);
    set("attention.value_length", 64);

    if (gemma4) {
        // layers 5 to 9 attend layer 3 (sliding) or 4 (global)
        set("attention.shared_kv_layers", 5);
        set("attention.sliding_window", 48);
        set("attention.key_length_swa", 64);
        set("attention.value_length_swa", 64);
        set("embedding_length_per_layer_input", 32);

        const uint32_t pattern[10] = { 1, 1, 1, 1, 0, 1, 1, 1, 1, 0 };
        gguf_set_arr_data(gguf.get(), "gemma4.attention.sliding_window_pattern", GGUF_TYPE_UINT32, pattern, 10);
    }

    if (qwen35) {
        set("full_attention_interval", 2);
        set("ssm.conv_kernel", 4);
        set("ssm.inner_size", 128);
        set("ssm.state_size", 32);
        set("ssm.time_step_rank", 4);
        set("ssm.group_count", 4);
        set("rope.dimension_count", 32);

        const int32_t sections[4] = { 8, 8, 0, 0 };
        gguf_set_arr_data(gguf.get(), "qwen35.rope.dimension_sections", GGUF_TYPE_INT32, sections, 4);
    }

    std::vector<std::string>  tokens;
    std::vector<const char *> pointers;
    std::vector<float>        scores(n_vocab, 0.0f);

    for (uint32_t i = 0; i < n_vocab; ++i) {
        tokens.push_back("tok_" + std::to_string(i));
    }
    for (const auto & t : tokens) {
        pointers.push_back(t.c_str());
    }

    gguf_set_val_str(gguf.get(), "tokenizer.ggml.model", "test");
    gguf_set_arr_str(gguf.get(), "tokenizer.ggml.tokens", pointers.data(), n_vocab);
    gguf_set_arr_data(gguf.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), n_vocab);

    return gguf;
}

static void set_random(ggml_tensor * tensor, void *) {
    std::mt19937                    gen(std::hash<std::string>()(tensor->name));
    std::normal_distribution<float> dis(0.0f, 0.1f);

    std::vector<float> data(ggml_nelements(tensor));

    for (auto & x : data) {
        x = dis(gen);

        // a decay
        if (strstr(tensor->name, "ssm_a")) {
            x = -fabsf(x);
        }
    }

    ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
}

static int n_gpu_layers = 0;

static llama_model_ptr load(const std::string & path, const std::string & policy, bool no_alloc = false) {
    std::vector<llama_model_kv_override> overrides;
    llama_hwkv_policy_override(overrides, policy);

    auto params = llama_model_default_params();

    params.n_gpu_layers = n_gpu_layers;
    params.kv_overrides = overrides.data();

    if (path.rfind("made:", 0) == 0) {
        const auto gguf = make_metadata(path.substr(5));

        return llama_model_ptr(llama_model_init_from_user(gguf.get(), set_random, nullptr, params));
    }

    params.no_alloc = no_alloc;
    if (no_alloc) {
        params.load_mode = LLAMA_LOAD_MODE_NONE;
    }

    return llama_model_ptr(llama_model_load_from_file(path.c_str(), params));
}

static json layers_of(const llama_model * model) {
    std::string res(llama_hwkv_layers(model, nullptr, 0), '\0');
    llama_hwkv_layers(model, &res[0], res.size() + 1);

    return json::parse(res);
}

// windows_of(layer, KV head) gives a window or 0 for full
template <typename F> static std::string make_policy(const json & layers, int n_sink, F && windows_of) {
    json rows = json::array();

    for (const auto & layer : layers["layers"]) {
        if (layer["kind"] != "attention") {
            continue;
        }

        json windows = json::array();

        for (int ih = 0; ih < layer["n_head_kv"]; ++ih) {
            const int w = windows_of((int) rows.size(), ih);

            windows.push_back(w == 0 ? json("full") : json(w));
        }

        rows.push_back({
            { "layer",   layer["layer"] },
            { "windows", windows        }
        });
    }

    const std::string text =
        json({
                 { "format",  "hwkv-policy" },
                 { "version", 1             },
                 { "n_sink",  n_sink        },
                 { "layers",  rows          }
    })
            .dump();

    char id[64];
    char err[1024];
    REQUIRE(llama_hwkv_register(text.c_str(), id, sizeof(id), err, sizeof(err)) == 0, "%s", err);

    return id;
}

static llama_context_params ctx_params(uint32_t n_ctx, uint32_t n_batch, uint32_t n_ubatch) {
    auto params = llama_context_default_params();

    params.n_ctx           = n_ctx;
    params.n_batch         = n_batch;
    params.n_ubatch        = n_ubatch;
    params.n_threads       = 1;  // small models: threads that wait for each other cost more than they bring
    params.n_threads_batch = 1;

    return params;
}

// the same masks with rings as long as the context, in which nothing is recycled: a ring has room for a ubatch besides its
//   window. what is decoded in it comes in batches that are no larger than the other context's ubatches
static llama_context_ptr full_ring_context(llama_model * model, llama_context_params params) {
    params.n_batch  = params.n_ctx;
    params.n_ubatch = params.n_ctx;

    llama_context_ptr ctx(llama_init_from_model(model, params));

    if (ctx && llama_hwkv_active(ctx.get())) {
        const json info = json::parse(llama_hwkv_info_str(ctx.get()));

        for (const auto & group : info["groups"]) {
            REQUIRE(group["cells"] == llama_n_ctx_seq(ctx.get()), "a ring of %s cells is no reference",
                    group["cells"].dump().c_str());
        }
    }

    return ctx;
}

struct token_at {
    llama_token  token;
    llama_pos    pos;
    llama_seq_id seq;
    bool         output;
};

static int decode(llama_context * ctx, const std::vector<token_at> & tokens) {
    llama_batch batch = llama_batch_init(tokens.size(), 0, 1);

    for (const auto & t : tokens) {
        const int i = batch.n_tokens++;

        batch.token[i]     = t.token;
        batch.pos[i]       = t.pos;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = t.seq;
        batch.logits[i]    = t.output;
    }

    const int res = llama_decode(ctx, batch);

    llama_batch_free(batch);

    return res;
}

static std::vector<float> logits_of(llama_context * ctx, int i) {
    const float * logits = llama_get_logits_ith(ctx, i);
    REQUIRE(logits, "no logits");

    return std::vector<float>(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
}

// prefill n_prompt tokens in batches of n_batch, then decode the rest one by one; the logits of all of these
static std::vector<float> run(llama_context *                  ctx,
                              const std::vector<llama_token> & tokens,
                              size_t                           n_prompt,
                              size_t                           n_batch) {
    llama_memory_clear(llama_get_memory(ctx), true);

    std::vector<token_at> batch;
    std::vector<float>    res;

    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.push_back({ tokens[i], (llama_pos) i, 0, i + 1 >= n_prompt });

        if (i + 1 >= n_prompt || batch.size() == n_batch) {
            if (decode(ctx, batch) != 0) {
                return {};
            }
            if (i + 1 >= n_prompt) {
                const auto logits = logits_of(ctx, -1);
                res.insert(res.end(), logits.begin(), logits.end());
            }

            batch.clear();
        }
    }

    return res;
}

static std::vector<llama_token> random_tokens(const llama_model * model, size_t n, std::mt19937 & rng) {
    std::vector<llama_token> res(n);

    for (auto & t : res) {
        t = rng() % llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    return res;
}

static std::string stem(const std::string & path) {
    return std::filesystem::path(path).stem().string();
}

//
// archs
//

static bool has_learned_positions(const std::string & path) {
    if (path.rfind("made:", 0) == 0) {
        return false;
    }

    gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/true, /*.ctx =*/nullptr }));

    return gguf && gguf_find_tensor(gguf.get(), "position_embd.weight") >= 0;
}

static const int N_SINK[] = { 1, 4, 64 };

// different per layer and KV head, some full
static int windows_of(int i, int ih) {
    const int windows[] = { 32, 0, 100, 16 };

    return windows[(i + ih) % 4];
}

// one architecture: returns what to print; exits on a failure
static std::string test_arch(const std::string & path, int n_sink) {
    std::string policy;

    {
        auto model = load(path, "off");

        if (!model) {
            return "not loaded by this build";
        }

        const json layers = layers_of(model.get());

        if (!layers["refusal"].is_null()) {
            // a policy for it must be refused when the context is made
            policy = make_policy(layers, n_sink, [](int, int) { return 32; });

            auto refused = load(path, policy);

            if (refused && policy != make_policy(json({
                                                     { "layers", json::array() }
            }),
                                                 n_sink, [](int, int) { return 0; })) {
                llama_context_ptr ctx(llama_init_from_model(refused.get(), ctx_params(2048, 512, 64)));
                REQUIRE(!ctx || !llama_hwkv_active(ctx.get()), "%s: a policy is served in spite of: %s", path.c_str(),
                        layers["refusal"].dump().c_str());
            }

            return "refused: " + layers["refusal"].get<std::string>();
        }

        // different per layer and head, some full
        policy = make_policy(layers, n_sink, windows_of);
    }

    auto off = load(path, "off");
    auto on  = load(path, policy);

    REQUIRE(on, "%s: the policy is not accepted", path.c_str());

    std::mt19937 rng(1);

    // rings of 256 cells evict after 256 tokens, and wrap within the windows of the last tokens, which come one by one
    //   a table of learned positions ends before that
    const size_t n_prompt = has_learned_positions(path) ? 240 : 540;

    std::vector<llama_token> tokens;

    const auto run_with = [&](llama_model * model, const llama_context_params & params, bool full_ring = false) {
        llama_context_ptr ctx =
            full_ring ? full_ring_context(model, params) : llama_context_ptr(llama_init_from_model(model, params));

        if (!ctx) {
            return std::vector<float>();
        }

        REQUIRE(llama_hwkv_active(ctx.get()) == (model != off.get()), "%s: grouped cache or not", path.c_str());

        if (model == on.get() && !full_ring) {
            const json info = json::parse(llama_hwkv_info_str(ctx.get()));

            for (const auto & group : info["groups"]) {
                REQUIRE(group["window"].is_null() || group["cells"] <= 256, "%s: the ring of window %s does not evict",
                        path.c_str(), group["window"].dump().c_str());
            }
        }

        return run(ctx.get(), tokens, n_prompt, params.n_ubatch);
    };

    auto params = ctx_params(2048, 512, 64);

    // in full precision a wrong cell cannot hide in rounding
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k          = GGML_TYPE_F32;
    params.type_v          = GGML_TYPE_F32;

    double err_full = 0.0;
    double err      = 0.0;
    double control  = 0.0;

    // devices round more: 3e-2 of the control was seen
    const double margin = n_gpu_layers > 0 ? 10.0 : 100.0;

    // what ggml rounds to F16 in between (the table of GELU) turns a difference in the last bit into one of 1e-9, if a value lies at a
    // rounding boundary. That depends on the tokens; what a wrong cell does, does not: other tokens tell the two apart
    for (int attempt = 0; attempt < 3; ++attempt) {
        tokens = random_tokens(off.get(), n_prompt + 6, rng);

        const auto logits_off = run_with(off.get(), params);

        if (logits_off.empty()) {
            return "not run: upstream itself cannot run this model in such a context";
        }

        // the longest windows that are not full, which mask nothing here
        const auto layers  = layers_of(off.get());
        const int  longest = params.n_ctx - n_sink - 1;

        auto wide = load(path, make_policy(layers, n_sink, [&](int i, int ih) { return (i + ih) % 2 ? 0 : longest; }));

        err_full = nmse(run_with(wide.get(), params), logits_off);

        const auto logits_ref = run_with(on.get(), params, true);

        err = nmse(run_with(on.get(), params), logits_ref);

        // what one token more in every window, or one sink token more, would change: the least fault that the comparison has to see
        on = n_sink > 0 ? load(path, make_policy(layers, n_sink + 1, windows_of)) :
                          load(path, make_policy(layers, 0, [](int i, int ih) {
                                   const int w = windows_of(i, ih);
                                   return w ? w + 1 : 0;
                               }));

        control = nmse(run_with(on.get(), params, true), logits_ref);

        on = load(path, policy);

        if (err_full <= std::max(1e-14, control / margin) && err <= control / margin) {
            break;
        }
    }

    REQUIRE(err_full <= std::max(1e-14, control / margin),
            "%s: full windows differ from upstream's path: NMSE %g, control %g", path.c_str(), err_full, control);
    REQUIRE(err <= control / margin, "%s: the rings differ from full rings: NMSE %g, control %g", path.c_str(), err,
            control);

    // what a dry run foresees is what is allocated
    if (path.rfind("made:", 0) != 0) {
        auto dry = load(path, policy, true);

        llama_context_ptr ctx_dry(llama_init_from_model(dry.get(), params));
        llama_context_ptr ctx(llama_init_from_model(on.get(), params));

        size_t bytes[2] = { 0, 0 };

        for (const auto & [_, mb] : llama_get_memory_breakdown(ctx_dry.get())) {
            bytes[0] += mb.context;
        }
        for (const auto & [_, mb] : llama_get_memory_breakdown(ctx.get())) {
            bytes[1] += mb.context;
        }

        REQUIRE(bytes[0] == bytes[1], "%s: a dry run foresees %zu bytes, %zu are allocated", path.c_str(), bytes[0],
                bytes[1]);
    }

    // the path that matters, where rounding to F16 hides more
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k          = GGML_TYPE_F16;
    params.type_v          = GGML_TYPE_F16;

    const double err_fa = nmse(run_with(on.get(), params), run_with(on.get(), params, true));

    REQUIRE(err_fa <= 1e-6, "%s: the rings differ from full rings with FlashAttention: NMSE %g", path.c_str(), err_fa);

    char buf[256];
    snprintf(buf, sizeof(buf), "ok: n_sink %2d, NMSE %.1e (one token more: %.1e), with FlashAttention %.1e%s", n_sink,
             err, control, err_fa, n_prompt < 256 ? " (no eviction: learned positions end at 256)" : "");

    return buf;
}

static int test_archs(const std::string & path_arg) {
    std::vector<std::string> paths;

    if (!std::filesystem::is_directory(path_arg)) {
        paths.push_back(path_arg);
    } else {
        for (const auto & entry : std::filesystem::directory_iterator(path_arg)) {
            if (entry.path().extension() == ".gguf") {
                paths.push_back(entry.path().string());
            }
        }

        std::sort(paths.begin(), paths.end());

        REQUIRE(!paths.empty(), "no models in %s", path_arg.c_str());

        paths.insert(paths.end(), std::begin(MADE), std::end(MADE));
    }

    size_t n_ok = 0;

    for (size_t i = 0; i < paths.size(); ++i) {
        const auto & path = paths[i];

        // without sinks, and with one number of them
        for (const int n_sink : { 0, N_SINK[i % 3] }) {
            const auto res = test_arch(path, n_sink);

            n_ok += n_sink == 0 && res.rfind("ok", 0) == 0;

            printf("%-40s %s\n", stem(path).c_str(), res.c_str());
            fflush(stdout);

            if (res.rfind("ok", 0) != 0) {
                break;
            }
        }
    }

    printf("%zu of %zu models are served under a policy\n", n_ok, paths.size());

    return n_ok > 0 ? 0 : 1;
}

//
// walk
//

struct walk_params {
    bool     unified  = true;
    bool     fa       = true;
    uint32_t n_seq    = 3;
    uint32_t n_ubatch = 32;
    int      n_sink   = 0;
    uint32_t seed     = 1;
    int      n_steps  = 60;
};

struct walk {
    static constexpr uint32_t N_CTX = 1280;  // of one sequence

    walk(const std::string & path, const walk_params & wp) : wp(wp), rng(wp.seed), seqs(wp.n_seq) {
        json layers;

        {
            auto model = load(path, "off");
            REQUIRE(model, "cannot load %s", path.c_str());
            layers = layers_of(model.get());
        }

        const std::vector<int> choices =
            wp.seed % 3 == 2 ? std::vector<int>{ 1, 2, 3, 40, 150, 0 } : std::vector<int>{ 16, 40, 40, 150, 0 };

        // more than any layer has KV heads
        std::vector<int> windows(1024);

        for (size_t i = 0; i < windows.size(); ++i) {
            windows[i] = i == 0 ? 40 : choices[rng() % choices.size()];
        }

        const auto policy = [&](int n_sink, int first, int more) {
            return make_policy(layers, n_sink, [&](int i, int ih) {
                const int w = i + ih == 0 ? first : windows[(31 * i + ih) % windows.size()];

                return w ? w + more : 0;
            });
        };

        model       = load(path, policy(wp.n_sink, 40, 0));
        model_other = load(path, wp.n_sink > 0 ? policy(wp.n_sink - 1, 40, 0) : policy(0, 41, 0));

        auto params = ctx_params(wp.n_seq * N_CTX, 256, wp.n_ubatch);

        params.n_seq_max       = wp.n_seq;
        params.kv_unified      = wp.unified;
        params.flash_attn_type = wp.fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k          = wp.fa ? GGML_TYPE_F16 : GGML_TYPE_F32;
        params.type_v          = wp.fa ? GGML_TYPE_F16 : GGML_TYPE_F32;

        ctx.reset(llama_init_from_model(model.get(), params));
        ctx_other.reset(llama_init_from_model(model_other.get(), params));

        params.n_ctx     = N_CTX;
        params.n_seq_max = 1;

        ctx_fresh = full_ring_context(model.get(), params);

        REQUIRE(ctx && ctx_other && ctx_fresh, "cannot make the contexts");
        REQUIRE(llama_hwkv_active(ctx.get()), "no grouped cache");

        mem = llama_get_memory(ctx.get());

        const auto tokens = random_tokens(model.get(), 300, rng);

        // what one token more would change: the least fault to be seen, in full precision at least
        const auto change = [&](const std::string & policy_wider) {
            auto model_wider = load(path, policy_wider);
            auto ctx_wider   = full_ring_context(model_wider.get(), params);

            return nmse(run_full(ctx_wider.get(), tokens), run_full(ctx_fresh.get(), tokens));
        };

        control = change(policy(wp.n_sink, 40, 1));

        if (wp.n_sink > 0) {
            control = std::min(control, change(policy(wp.n_sink + 1, 40, 0)));
        }

        // rounding to F16; devices have different kernels for different batches (1.3e-4 was seen)
        const double noise = n_gpu_layers > 0 ? 5e-4 : 1e-4;

        tol = wp.fa ? std::max(control / 3, noise) : control / 5;

        check_hole();
    }

    const walk_params wp;

    std::mt19937 rng;

    llama_model_ptr model, model_other;

    llama_context_ptr ctx, ctx_other, ctx_fresh;

    llama_memory_t mem;

    // what each sequence holds
    std::vector<std::vector<llama_token>> seqs;

    struct saved_state {
        std::vector<llama_token> tokens;
        std::vector<uint8_t>     data;

        llama_pos pos_min = -1;  // promised for after the restore
    };

    saved_state saved;       // of one sequence
    saved_state checkpoint;  // partial, of sequence 0: valid while sequence 0 starts with its tokens

    double control = 0.0;
    double tol     = 0.0;
    double worst   = 0.0;

    int n_refused = 0;

    uint32_t pick(uint32_t n) { return rng() % n; }

    // the logits of the last token
    std::vector<float> run_full(llama_context * c, const std::vector<llama_token> & tokens) const {
        return run(c, tokens, tokens.size(), wp.n_ubatch);
    }

    // room for n more tokens in sequence s
    bool fits(uint32_t s, size_t n) const { return seqs[s].size() + n + 8 <= N_CTX; }

    // append n random tokens to each of some sequences in one batch, in runs or interleaved
    void op_decode(const std::vector<uint32_t> & which, size_t n) {
        std::vector<token_at> batch;

        const bool interleave = pick(2) == 0;

        for (const uint32_t s : which) {
            for (size_t i = 0; i < n; ++i) {
                const llama_token t = random_tokens(model.get(), 1, rng)[0];

                batch.push_back({ t, (llama_pos) seqs[s].size(), (llama_seq_id) s, i + 1 == n });
                seqs[s].push_back(t);
            }
        }

        if (interleave) {
            std::stable_sort(batch.begin(), batch.end(), [](const auto & a, const auto & b) { return a.pos < b.pos; });
        }

        // llama-server's batches are at most n_batch tokens
        for (size_t i = 0; i < batch.size(); i += llama_n_batch(ctx.get())) {
            const std::vector<token_at> part(batch.begin() + i,
                                             batch.begin() + std::min(batch.size(), i + llama_n_batch(ctx.get())));

            REQUIRE(decode(ctx.get(), part) == 0, "decode fails although the context has room");
        }
    }

    // a length to cut sequence s to, often among its sink tokens or just beyond
    uint32_t pick_length(uint32_t s) {
        const size_t n_max = wp.n_sink > 0 && pick(3) == 0 ? wp.n_sink + 2 : seqs[s].size();

        return pick(std::min(n_max, seqs[s].size()) + 1);
    }

    // a sequence that had pos_min could be cut to p0 tokens or not: is that right?
    void require_cut(bool ok, llama_pos p0, llama_pos pos_min) const {
        // decoding there sees sink tokens only: all windows have them, but perhaps not the model's own
        if (p0 <= wp.n_sink && !llama_model_is_hybrid(model.get())) {
            REQUIRE(ok || llama_model_n_swa(model.get()) > 0, "the sequence cannot be cut to %d of its sink tokens",
                    p0);
        } else {
            REQUIRE(ok == (pos_min < p0), "the sequence can be cut to %d tokens: %d, but pos_min is %d", p0, ok,
                    pos_min);
        }
    }

    void op_rm(uint32_t s, llama_pos p0) {
        const llama_pos pos_min = llama_memory_seq_pos_min(mem, s);
        const llama_pos pos_max = llama_memory_seq_pos_max(mem, s);

        REQUIRE(pos_max == (llama_pos) seqs[s].size() - 1, "pos_max is %d, expected %d", pos_max,
                (int) seqs[s].size() - 1);

        const bool ok = llama_memory_seq_rm(mem, s, p0, -1);

        if (p0 > 0 && p0 <= pos_max) {
            require_cut(ok, p0, pos_min);
        }

        n_refused += !ok;

        if (ok) {
            seqs[s].resize(std::min<size_t>(seqs[s].size(), p0));
        }

        REQUIRE(llama_memory_seq_pos_max(mem, s) == (llama_pos) seqs[s].size() - 1, "pos_max after seq_rm(%d)", p0);
    }

    void op_clear(uint32_t s) {
        REQUIRE(llama_memory_seq_rm(mem, s, -1, -1), "a sequence cannot be removed");
        seqs[s].clear();
    }

    // copy the first n tokens, 0 for all
    void op_cp(uint32_t src, uint32_t dst, size_t n) {
        op_clear(dst);

        if (n == 0 || n >= seqs[src].size()) {
            llama_memory_seq_cp(mem, src, dst, -1, -1);
            seqs[dst] = seqs[src];
            return;
        }

        llama_memory_seq_cp(mem, src, dst, 0, n);

        const llama_pos pos_max = llama_memory_seq_pos_max(mem, dst);

        require_cut(pos_max >= 0, n, llama_memory_seq_pos_min(mem, src));

        REQUIRE(pos_max == -1 || pos_max == (llama_pos) n - 1, "pos_max is %d after a copy of %zu tokens", pos_max, n);

        seqs[dst].assign(seqs[src].begin(), seqs[src].begin() + pos_max + 1);
    }

    void op_save(uint32_t s) {
        saved.tokens  = seqs[s];
        saved.pos_min = llama_hwkv_state_pos_min(ctx.get(), s);
        saved.data.resize(llama_state_seq_get_size(ctx.get(), s));

        const size_t n = llama_state_seq_get_data(ctx.get(), saved.data.data(), saved.data.size(), s);
        REQUIRE(n == saved.data.size(), "%zu of %zu bytes saved", n, saved.data.size());

        // another policy must refuse it and keep no trace
        REQUIRE(llama_state_seq_set_data(ctx_other.get(), saved.data.data(), saved.data.size(), 0) == 0,
                "a state is restored under another policy");
        REQUIRE(llama_memory_seq_pos_max(llama_get_memory(ctx_other.get()), 0) == -1, "a refused state leaves cells");
    }

    // a state that was just restored goes back as far as was promised when it was saved, often used to the last token
    void cut_restored(uint32_t s, llama_pos pos_min) {
        REQUIRE(llama_memory_seq_pos_min(mem, s) == pos_min, "pos_min is %d after a restore, promised were %d",
                llama_memory_seq_pos_min(mem, s), pos_min);

        const llama_pos n = seqs[s].size();

        if (n > 0) {
            op_rm(s, pick(2) ? n : pos_min + 1 + pick(n - pos_min));
        }
    }

    void op_restore(uint32_t s) {
        if (saved.data.empty()) {
            return;
        }

        // cut short: refused, and the sequence is as it was (cut within the header) or empty
        if (pick(4) == 0) {
            REQUIRE(llama_state_seq_set_data(ctx.get(), saved.data.data(), saved.data.size() / 2, s) == 0,
                    "half a state is restored");

            if (llama_memory_seq_pos_max(mem, s) == -1) {
                seqs[s].clear();
            }

            verify(s);
        }

        REQUIRE(llama_state_seq_set_data(ctx.get(), saved.data.data(), saved.data.size(), s) == saved.data.size(),
                "a state is not restored");
        seqs[s] = saved.tokens;

        cut_restored(s, saved.pos_min);
    }

    // the sequence has just begun to recycle cells of the longest window and then goes back as far as it can: every token that
    //   comes next recycles a cell that was masked just before
    void op_tighten(uint32_t s) {
        const json info = json::parse(llama_hwkv_info_str(ctx.get()));

        size_t n_cells = 0;

        for (const auto & group : info["groups"]) {
            n_cells = group["window"].is_null() ? n_cells : (size_t) group["cells"];
        }

        op_clear(s);

        const size_t n = n_cells + pick(8);

        if (fits(s, n)) {
            op_decode({ s }, n);
            op_rm(s, std::min<llama_pos>(llama_memory_seq_pos_min(mem, s) + 1 + pick(10), n));
        }
    }

    // what llama-server does with draft tokens while other slots draft as well or read their prompts: whatever they take, the
    //   drafts can be taken back
    void op_draft(uint32_t s) {
        const size_t n_max = std::min(llama_hwkv_n_draft_max(ctx.get()), LLAMA_HWKV_N_SLACK);

        std::vector<token_at> batch;
        std::vector<size_t>   n_draft(wp.n_seq, 0);

        for (uint32_t i = 0; i < wp.n_seq; ++i) {
            const uint32_t q = (s + i) % wp.n_seq;

            const size_t n_free = llama_n_batch(ctx.get()) - batch.size();

            size_t n = 0;

            switch (q == s ? 3 : pick(4)) {
                case 0:
                    break;
                case 1:
                case 2:
                    n = 1 + pick(pick(4) ? 6 : 190);
                    break;
                default:
                    n_draft[q] = std::min(n_free > 0 ? n_free - 1 : 0, (size_t) pick(pick(2) ? 17 : n_max + 1));
                    n          = 1 + n_draft[q];
                    break;
            }

            n = std::min(n, n_free);

            if (!fits(q, n) || seqs[q].empty()) {
                n_draft[q] = 0;
                continue;
            }

            for (size_t j = 0; j < n; ++j) {
                batch.push_back(
                    { random_tokens(model.get(), 1, rng)[0], (llama_pos) seqs[q].size(), (llama_seq_id) q, true });
                seqs[q].push_back(batch.back().token);
            }
        }

        if (batch.empty()) {
            return;
        }

        REQUIRE(decode(ctx.get(), batch) == 0, "decode fails although the context has room");

        for (uint32_t q = 0; q < wp.n_seq; ++q) {
            const llama_pos p0 = seqs[q].size() - (pick(2) ? n_draft[q] : pick(n_draft[q] + 1));

            REQUIRE(llama_memory_seq_rm(mem, q, p0, -1), "draft tokens cannot be taken back");
            seqs[q].resize(p0);
        }
    }

    void op_drafts(uint32_t s) {
        if (llama_model_is_hybrid(model.get())) {
            return;
        }

        if (pick(2)) {
            op_tighten(s);
        }

        for (uint32_t i = 1 + pick(6); i > 0; --i) {
            op_draft(s);
        }

        verify(s);
    }

    // what llama-server does with a context checkpoint
    void op_checkpoint() {
        if (checkpoint.data.empty()) {
            checkpoint.tokens  = seqs[0];
            checkpoint.pos_min = llama_hwkv_state_pos_min(ctx.get(), 0);
            checkpoint.data.resize(llama_state_seq_get_size_ext(ctx.get(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            REQUIRE(llama_state_seq_get_data_ext(ctx.get(), checkpoint.data.data(), checkpoint.data.size(), 0,
                                                 LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == checkpoint.data.size(),
                    "checkpoint");
            return;
        }

        const bool valid = seqs[0].size() >= checkpoint.tokens.size() &&
                           std::equal(checkpoint.tokens.begin(), checkpoint.tokens.end(), seqs[0].begin());

        if (valid) {
            REQUIRE(llama_state_seq_set_data_ext(ctx.get(), checkpoint.data.data(), checkpoint.data.size(), 0,
                                                 LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == checkpoint.data.size(),
                    "a checkpoint is not restored");
            seqs[0] = checkpoint.tokens;

            cut_restored(0, checkpoint.pos_min);
        }

        checkpoint = {};
    }

    void op_whole_state() {
        std::vector<uint8_t> data(llama_state_get_size(ctx.get()));

        const size_t n = llama_state_get_data(ctx.get(), data.data(), data.size());

        // too small a buffer: refused, and all stays as it was
        const auto pos_mins = [&]() {
            std::vector<llama_pos> res;

            for (uint32_t s = 0; s < wp.n_seq; ++s) {
                res.push_back(llama_memory_seq_pos_min(mem, s));
            }

            return res;
        };

        const auto pos_mins_old = pos_mins();

        std::vector<uint8_t> small(n - n / 8);
        REQUIRE(llama_state_get_data(ctx.get(), small.data(), small.size()) == 0,
                "a whole state fits into less than its size");
        REQUIRE(pos_mins() == pos_mins_old, "a state that did not fit has changed the cache");

        const auto seqs_saved = seqs;

        // cut short: refused, and what is empty then is really empty
        if (pick(2) == 0) {
            REQUIRE(llama_state_set_data(ctx.get(), data.data(), n - 1 - pick(n / 2)) == 0,
                    "a part of a whole state is restored");

            for (uint32_t s = 0; s < wp.n_seq; ++s) {
                if (llama_memory_seq_pos_max(mem, s) == -1) {
                    seqs[s].clear();
                    verify(s);
                }
            }
        }

        for (uint32_t s = 0; s < wp.n_seq; ++s) {
            llama_memory_seq_rm(mem, s, -1, -1);
        }

        REQUIRE(llama_state_set_data(ctx.get(), data.data(), n) == n, "a whole state is not restored");

        seqs = seqs_saved;
    }

    // positions that are removed from the middle of a sequence, sink tokens among them, are gone for all of its windows
    void check_hole() {
        const auto tokens = random_tokens(model.get(), 330, rng);

        std::vector<float> logits[2];

        for (auto * c : { ctx.get(), ctx_fresh.get() }) {
            run(c, { tokens.begin(), tokens.begin() + 300 }, 300, wp.n_ubatch);

            llama_memory_seq_rm(llama_get_memory(c), 0, wp.n_sink / 2, wp.n_sink + 5);

            for (size_t i = 300; i < tokens.size(); ++i) {
                REQUIRE(decode(c,
                               {
                                   { tokens[i], (llama_pos) i, 0, true }
                }) == 0,
                        "decode fails after a removal");
            }

            logits[c == ctx.get()] = logits_of(c, -1);
        }

        llama_memory_clear(mem, true);

        const double err = nmse(logits[1], logits[0]);

        REQUIRE(err <= tol, "a sequence with a hole differs from the same in a full ring: NMSE %g > %g", err, tol);
    }

    // the next logits of a sequence against those of a fresh run of the same tokens
    void verify(uint32_t s) {
        if (!fits(s, 1)) {
            return;
        }

        op_decode({ s }, 1);

        const double err = nmse(logits_of(ctx.get(), -1), run_full(ctx_fresh.get(), seqs[s]));

        worst = std::max(worst, err);

        REQUIRE(err <= tol, "sequence %u of %zu tokens differs from a fresh run: NMSE %g > %g (seed %u)", s,
                seqs[s].size(), err, tol, wp.seed);
    }

    // sequences that begin with the same cells, until each is far beyond them
    void branch() {
        op_decode({ 0 }, 300);

        std::vector<uint32_t> all = { 0 };

        for (uint32_t s = 1; s < wp.n_seq; ++s) {
            op_cp(0, s, 0);
            all.push_back(s);
        }

        op_decode(all, 120);

        for (uint32_t s = 0; s < wp.n_seq; ++s) {
            verify(s);
        }
    }

    void step() {
        const uint32_t s = pick(wp.n_seq);

        switch (pick(12)) {
            case 0:
            case 1:
            case 2:
                {
                    const size_t n = 1 + pick(pick(2) ? 4 : 300);

                    std::vector<uint32_t> which;

                    for (uint32_t i = 0; i < wp.n_seq; ++i) {
                        if (fits(i, n) && (i == s || pick(2) == 0)) {
                            which.push_back(i);
                        }
                    }

                    op_decode(which, n);
                }
                break;
            case 3:
            case 4:
                op_rm(s, pick_length(s));
                break;
            case 5:
                op_rm(s, seqs[s].size() - std::min<size_t>(seqs[s].size(), pick(60)));
                break;
            case 6:
                op_cp(s, (s + 1 + pick(wp.n_seq - 1)) % wp.n_seq, wp.unified && pick(2) == 0 ? pick_length(s) : 0);
                break;
            case 7:
                op_save(s);
                break;
            case 8:
                op_restore(s);
                break;
            case 9:
                op_checkpoint();
                break;
            case 10:
                pick(3) == 0 ? op_whole_state() : op_clear(s);
                break;
            case 11:
                op_drafts(s);
                break;
        }

        verify(pick(wp.n_seq));
    }
};

static int test_walk(const std::string & path, const walk_params & wp) {
    walk w(path, wp);

    w.branch();

    for (int i = 0; i < wp.n_steps; ++i) {
        w.step();
    }

    printf(
        "%-28s seed %3u, %-7s, %-5s, -ub %-3u, n_sink %3d: %d steps, worst NMSE %.1e (one token more: %.1e), %d cuts "
        "refused\n",
        stem(path).c_str(), wp.seed, wp.unified ? "unified" : "split", wp.fa ? "fa" : "no fa", wp.n_ubatch, wp.n_sink,
        wp.n_steps, w.worst, w.control, w.n_refused);
    fflush(stdout);

    return 0;
}

static int test_drafts(const std::string & path, const walk_params & wp) {
    walk w(path, wp);

    REQUIRE(!llama_model_is_hybrid(w.model.get()), "drafts of a hybrid are taken back with states");

    for (int i = 0; i < wp.n_steps; ++i) {
        w.op_drafts(w.pick(wp.n_seq));
        w.verify(w.pick(wp.n_seq));
    }

    printf(
        "%-28s seed %3u, %u sequences, %-7s, -ub %-3u, n_sink %3d: drafts up to %d, worst NMSE %.1e (one token more: "
        "%.1e)\n",
        stem(path).c_str(), wp.seed, wp.n_seq, wp.unified ? "unified" : "split", wp.n_ubatch, wp.n_sink,
        llama_hwkv_n_draft_max(w.ctx.get()), w.worst, w.control);
    fflush(stdout);

    return 0;
}

//
// training
//

static int test_training(const std::string & path) {
    const uint32_t N = 256;

    std::mt19937 rng(1);

    bool trained[2];

    for (const bool on : { false, true }) {
        std::string policy = "off";

        if (on) {
            policy = make_policy(layers_of(load(path, "off").get()), 0, [](int, int) { return 32; });
        }

        auto model = load(path, policy);
        REQUIRE(model, "cannot load %s", path.c_str());

        auto params = ctx_params(N, N, N);

        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k          = GGML_TYPE_F32;
        params.type_v          = GGML_TYPE_F32;

        llama_context_ptr ctx(llama_init_from_model(model.get(), params));
        REQUIRE(ctx && llama_hwkv_active(ctx.get()) == on, "grouped cache or not");

        const auto tokens = random_tokens(model.get(), N + 1, rng);
        const auto before = run(ctx.get(), { tokens.begin(), tokens.end() - 1 }, N, N);

        last_error.clear();

        llama_opt_params opt = {};

        opt.param_filter   = llama_opt_param_filter_all;
        opt.get_opt_pars   = ggml_opt_get_default_optimizer_params;
        opt.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_ADAMW;

        llama_opt_init(ctx.get(), model.get(), opt);

        const bool refused = last_error.find("cannot be trained under a policy") != std::string::npos;
        REQUIRE(refused == on, "training is refused: %d", refused);

        const auto dataset = ggml_opt_dataset_init(GGML_TYPE_I32, GGML_TYPE_I32, N, N, 1, 1);
        const auto result  = ggml_opt_result_init();

        std::copy(tokens.begin(), tokens.end() - 1, (int32_t *) ggml_opt_dataset_data(dataset)->data);
        std::copy(tokens.begin() + 1, tokens.end(), (int32_t *) ggml_opt_dataset_labels(dataset)->data);

        llama_opt_epoch(ctx.get(), dataset, result, nullptr, 1, nullptr, nullptr);

        ggml_opt_dataset_free(dataset);
        ggml_opt_result_free(result);

        // an optimiser has buffers in the scheduler of its context: decode with another one
        llama_context_ptr ctx_after(llama_init_from_model(model.get(), params));

        trained[on] = run(on ? ctx.get() : ctx_after.get(), { tokens.begin(), tokens.end() - 1 }, N, N) != before;
    }

    REQUIRE(trained[0], "without a policy nothing is trained either");
    REQUIRE(!trained[1], "the model was changed in spite of the refusal");

    printf("%s is trained without a policy and not under one\n", stem(path).c_str());

    return 0;
}

static int usage(const char * name) {
    fprintf(
        stderr,
        "usage: %s archs DIR|MODEL [-ngl N]\n       %s walk|drafts MODEL [--seeds FIRST LAST] [--steps N] [-ngl N]\n"
        "       %s training MODEL\n",
        name, name, name);
    return 2;
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        return usage(argv[0]);
    }

    const std::string mode = argv[1];
    const std::string path = argv[2];

    uint32_t    seed_first = 1;
    uint32_t    seed_last  = 4;
    walk_params wp;

    for (int i = 3; i < argc; ++i) {
        if (strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
            seed_first = atoi(argv[++i]);
            seed_last  = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
            wp.n_steps = atoi(argv[++i]);
        } else if (strcmp(argv[i], "-ngl") == 0 && i + 1 < argc) {
            n_gpu_layers = atoi(argv[++i]);
        } else {
            return usage(argv[0]);
        }
    }

    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            // refusals are expected here, so errors are shown only when a test fails
            if (getenv("TEST_HWKV_LOG")) {
                fputs(text, stderr);
            } else if (level == GGML_LOG_LEVEL_ERROR) {
                last_error = text;
            }
        },
        nullptr);

    llama_backend_init();

    int res = 2;

    if (mode == "archs") {
        res = test_archs(path);
    } else if (mode == "training") {
        res = test_training(path);
    } else if (mode == "drafts") {
        for (wp.seed = seed_first; wp.seed <= seed_last; ++wp.seed) {
            for (wp.n_seq = 2; wp.n_seq <= 4; ++wp.n_seq) {
                wp.fa       = false;  // in full precision a wrong cell cannot hide in rounding
                wp.unified  = wp.seed % 2 == 0;
                wp.n_ubatch = wp.seed / 2 % 2 == 0 ? 256 : 64;
                wp.n_sink   = wp.seed / 4 % 2 == 0 ? 0 : 4;

                res = test_drafts(path, wp);
            }
        }
    } else if (mode == "walk") {
        for (wp.seed = seed_first; wp.seed <= seed_last; ++wp.seed) {
            wp.unified  = wp.seed % 2 == 0;
            wp.fa       = wp.seed / 2 % 2 == 0;
            wp.n_seq    = 2 + wp.seed % 3;
            wp.n_ubatch = wp.seed / 4 % 2 == 0 ? 32 : 256;

            // each n_sink meets each of the others' values
            wp.n_sink =
                wp.seed / 8 % 2 == 0 ? 0 : std::vector<int>{ 1, 4, 64, 200 }[std::min(wp.seed % 8, 7 - wp.seed % 8)];

            res = test_walk(path, wp);
        }
    }

    llama_backend_free();

    return res == 2 ? usage(argv[0]) : res;
}
