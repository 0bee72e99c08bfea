#include "llama-hwkv.h"

#include "../vendor/nlohmann/json.hpp"
#include "llama-context.h"
#include "llama-hwkv-policy.h"
#include "llama-hwkv-read-back.h"
#include "llama-impl.h"
#include "llama-memory-hwkv.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

using json = nlohmann::ordered_json;

// the stock bindings pass these by value: a build in which they differ must not load
#if defined(__x86_64__) || defined(__aarch64__)
static_assert(sizeof(llama_context_params) == 160, "llama_context_params is not what the bindings expect");
static_assert(sizeof(llama_model_params) == 80, "llama_model_params is not what the bindings expect");
static_assert(sizeof(llama_model_kv_override) == 264, "llama_model_kv_override is not what the bindings expect");
#endif

static int32_t hwkv_copy(const std::string & text, char * buf, size_t n) {
    return snprintf(buf, n, "%s", text.c_str());
}

// no exception may leave a function that C, or Python, calls

// 0, or -1 with one sentence in err
template <typename F> static int32_t hwkv_try(char * err, size_t n_err, F && f) {
    std::string what = "an unknown exception";

    try {
        f();
        return 0;
    } catch (const std::exception & e) {
        what = e.what();
    } catch (...) {
    }

    hwkv_copy(llama_hwkv_printable(what), err, n_err);

    return -1;
}

// the result of f, or the one for a failure with the sentence in the log
template <typename F, typename R> static R hwkv_try_or(const char * func, R failed, F && f) {
    char err[1024];

    R res = failed;

    if (hwkv_try(err, sizeof(err), [&] { res = f(); }) != 0) {
        LLAMA_LOG_ERROR("%s: %s\n", func, err);
        return failed;
    }

    return res;
}

template <typename F> static int32_t hwkv_register(F && read, char * id, size_t n_id, char * err, size_t n_err) {
    return hwkv_try(err, n_err, [&] {
        if ((size_t) hwkv_copy(llama_hwkv_policy_register(read()), id, n_id) >= n_id) {
            throw std::runtime_error("the buffer for the id is too short");
        }
    });
}

int32_t llama_hwkv_register(const char * json, char * id, size_t n_id, char * err, size_t n_err) {
    return hwkv_register([&] { return llama_hwkv_policy_from_json(json, "hwkv policy"); }, id, n_id, err, n_err);
}

int32_t llama_hwkv_register_file(const char * path, char * id, size_t n_id, char * err, size_t n_err) {
    return hwkv_register([&] { return llama_hwkv_policy_from_file(path); }, id, n_id, err, n_err);
}

static const llama_memory_hwkv * hwkv_memory(const llama_context * ctx) {
    return dynamic_cast<const llama_memory_hwkv *>(ctx->get_memory());
}

bool llama_hwkv_active(const llama_context * ctx) {
    return hwkv_try_or(__func__, false, [&] { return hwkv_memory(ctx) != nullptr; });
}

int32_t llama_hwkv_n_draft_max(const llama_context * ctx) {
    return hwkv_try_or(__func__, (int32_t) 0, [&] {
        const auto * mem = hwkv_memory(ctx);

        return mem ? mem->get_sizing().n_draft_max : 0;
    });
}

llama_pos llama_hwkv_state_pos_min(const llama_context * ctx, llama_seq_id seq_id) {
    return hwkv_try_or(__func__, (llama_pos) -1, [&] {
        const auto * mem = hwkv_memory(ctx);

        return mem ? mem->state_pos_min(seq_id) : -1;
    });
}

int32_t llama_hwkv_info(const llama_context * ctx, char * buf, size_t n) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        const auto * mem = hwkv_memory(ctx);

        return hwkv_copy(mem ? llama_hwkv_footprint_json(mem->footprint()) : "{\"active\":false}", buf, n);
    });
}

int32_t llama_hwkv_table(const llama_context * ctx, char * buf, size_t n) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        std::string res;

        if (const auto * mem = hwkv_memory(ctx)) {
            for (const auto & line : llama_hwkv_footprint_table(mem->footprint())) {
                res += line + "\n";
            }
        }

        return hwkv_copy(res, buf, n);
    });
}

int32_t llama_hwkv_select(llama_model * model, const char * value, char * err, size_t n_err) {
    return hwkv_try(err, n_err, [&] {
        llama_hwkv_policy_ptr policy;

        if (std::string(value) == "calibrate") {
            auto res = std::make_shared<llama_hwkv_policy>();

            res->source    = "calibration";
            res->calibrate = true;

            policy = std::move(res);
        } else if (std::string(value) != "off") {
            policy = llama_hwkv_policy_registered(value);
            policy->check(*model);
        }

        llama_hwkv_policy_set(*model, std::move(policy));
    });
}

//
// calibration
//

static llama_hwkv_layerwise & hwkv_layerwise(const llama_context * ctx) {
    auto * res = llama_hwkv_layerwise_of(ctx->get_memory());

    if (!res) {
        throw std::runtime_error("the context is not one for calibration");
    }

    return *res;
}

static size_t hwkv_values(const std::vector<float> & values, float * dst) {
    if (dst) {
        std::copy(values.begin(), values.end(), dst);
    }

    return values.size();
}

int32_t llama_hwkv_layer_windows(llama_context * ctx,
                                 int32_t         layer,
                                 int32_t         n_sink,
                                 const int32_t * windows,
                                 int32_t         n_windows) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        hwkv_layerwise(ctx).set_windows(layer, n_sink, { windows, windows + n_windows });
        return 0;
    });
}

int32_t llama_hwkv_layer_samples(llama_context *      ctx,
                                 const llama_seq_id * seq_id,
                                 const llama_pos *    pos,
                                 int32_t              n_samples) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        std::vector<std::pair<llama_seq_id, llama_pos>> samples;

        for (int32_t i = 0; i < n_samples; ++i) {
            samples.emplace_back(seq_id[i], pos[i]);
        }

        hwkv_layerwise(ctx).set_samples(std::move(samples));
        return 0;
    });
}

int32_t llama_hwkv_layer_run(llama_context * ctx,
                             llama_batch     batch,
                             int32_t         layer_from,
                             int32_t         layer_to,
                             char *          err,
                             size_t          n_err) {
    return hwkv_try(err, n_err, [&] {
        auto & lw = hwkv_layerwise(ctx);

        try {
            // the cells are taken once more, in the same order; K and V of the layers before stay in them
            llama_memory_clear(llama_get_memory(ctx), false);

            lw.begin(layer_from, layer_to);

            const int32_t res = llama_decode(ctx, batch);

            if (res != 0) {
                throw std::runtime_error("decoding failed with " + std::to_string(res));
            }
        } catch (...) {
            lw.end();
            throw;
        }

        lw.end();
    });
}

size_t llama_hwkv_layer_q(const llama_context * ctx, float * dst) {
    return hwkv_try_or(__func__, (size_t) 0, [&] { return hwkv_values(hwkv_layerwise(ctx).get().q, dst); });
}

size_t llama_hwkv_layer_out(const llama_context * ctx, float * dst) {
    return hwkv_try_or(__func__, (size_t) 0, [&] { return hwkv_values(hwkv_layerwise(ctx).get().out, dst); });
}

size_t llama_hwkv_layer_sinks(const llama_context * ctx, float * dst) {
    return hwkv_try_or(__func__, (size_t) 0, [&] { return hwkv_values(hwkv_layerwise(ctx).get().sinks, dst); });
}

float llama_hwkv_layer_scale(const llama_context * ctx) {
    return hwkv_try_or(__func__, NAN, [&] { return hwkv_layerwise(ctx).get().scale; });
}

float llama_hwkv_layer_softcap(const llama_context * ctx) {
    return hwkv_try_or(__func__, NAN, [&] {
        const auto & hparams = ctx->get_model().hparams;

        return hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    });
}

int32_t llama_hwkv_layer_kv(const llama_context * ctx,
                            int32_t               layer,
                            int32_t               head_kv,
                            llama_seq_id          seq_id,
                            int32_t               n_pos,
                            float *               k,
                            float *               v) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        hwkv_layerwise(ctx);

        // for calibration each KV head of a layer has a group of its own
        return llama_hwkv_read_back(*hwkv_memory(ctx)->get_kv(head_kv), layer, seq_id, n_pos, k, v) ? 0 : -1;
    });
}

int32_t llama_hwkv_layer_save(llama_context * ctx) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] { return hwkv_layerwise(ctx).save(); });
}

int32_t llama_hwkv_layer_restore(llama_context * ctx, int32_t id) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] { return hwkv_layerwise(ctx).restore(id) ? 0 : -1; });
}

void llama_hwkv_layer_drop(llama_context * ctx, int32_t id) {
    hwkv_try_or(__func__, (int32_t) -1, [&] {
        hwkv_layerwise(ctx).drop(id);
        return 0;
    });
}

int32_t llama_hwkv_layers(const llama_model * model, char * buf, size_t n) {
    return hwkv_try_or(__func__, (int32_t) -1, [&] {
        const auto & hparams = model->hparams;

        json layers = json::array();

        for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
            layers.push_back({
                { "layer", il },
                { "kind", llama_hwkv_layer_kind_name(llama_hwkv_layer_kind_of(*model, il)) },
                { "n_head", hparams.n_head(il) },
                { "n_head_kv", hparams.n_head_kv(il) },
                { "head_dim_k", hparams.n_embd_head_k(il) },
                { "head_dim_v", hparams.n_embd_head_v(il) },
            });
        }

        const std::string refusal = llama_hwkv_refusal(*model);

        return hwkv_copy(json({
                                  { "architecture", model->arch_name()                              },
                                  { "refusal",      refusal.empty() ? json(nullptr) : json(refusal) },
                                  { "layers",       layers                                          },
        })
                             .dump(),
                         buf, n);
    });
}
