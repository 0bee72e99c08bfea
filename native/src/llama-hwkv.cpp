#include "llama-hwkv.h"

#include "llama-context.h"
#include "llama-hwkv-policy.h"
#include "llama-memory-hwkv.h"
#include "llama-model.h"

#include "../vendor/nlohmann/json.hpp"

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

using json = nlohmann::ordered_json;

// the stock bindings pass these by value: a build in which they differ must not load
#if defined(__x86_64__) || defined(__aarch64__)
static_assert(sizeof(llama_context_params)    == 160, "llama_context_params is not what the bindings expect");
static_assert(sizeof(llama_model_params)      ==  80, "llama_model_params is not what the bindings expect");
static_assert(sizeof(llama_model_kv_override) == 264, "llama_model_kv_override is not what the bindings expect");
#endif

static int32_t hwkv_copy(const std::string & text, char * buf, size_t n) {
    return snprintf(buf, n, "%s", text.c_str());
}

template <typename F>
static int32_t hwkv_register(F && read, char * id, size_t n_id, char * err, size_t n_err) {
    try {
        if ((size_t) hwkv_copy(llama_hwkv_policy_register(read()), id, n_id) >= n_id) {
            throw std::runtime_error("the buffer for the id is too short");
        }
        return 0;
    } catch (const std::exception & e) {
        hwkv_copy(e.what(), err, n_err);
        return -1;
    }
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
    return hwkv_memory(ctx) != nullptr;
}

int32_t llama_hwkv_info(const llama_context * ctx, char * buf, size_t n) {
    const auto * mem = hwkv_memory(ctx);

    return hwkv_copy(mem ? mem->info() : "{\"active\":false}", buf, n);
}

int32_t llama_hwkv_table(const llama_context * ctx, char * buf, size_t n) {
    std::string res;

    if (const auto * mem = hwkv_memory(ctx)) {
        for (const auto & line : mem->table()) {
            res += line + "\n";
        }
    }

    return hwkv_copy(res, buf, n);
}

int32_t llama_hwkv_layers(const llama_model * model, char * buf, size_t n) {
    const auto & hparams = model->hparams;

    json layers = json::array();

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        layers.push_back({
            { "layer",      il                                                           },
            { "kind",       llama_hwkv_layer_kind_name(llama_hwkv_layer_kind_of(*model, il)) },
            { "n_head",     hparams.n_head(il)                                           },
            { "n_head_kv",  hparams.n_head_kv(il)                                        },
            { "head_dim_k", hparams.n_embd_head_k(il)                                    },
            { "head_dim_v", hparams.n_embd_head_v(il)                                    },
        });
    }

    const std::string refusal = llama_hwkv_refusal(*model);

    return hwkv_copy(json({
        { "architecture", model->arch_name()                              },
        { "refusal",      refusal.empty() ? json(nullptr) : json(refusal) },
        { "layers",       layers                                          },
    }).dump(), buf, n);
}
