#include "llama-hwkv-policy.h"

#include "../vendor/nlohmann/json.hpp"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-model.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>

using json = nlohmann::ordered_json;

//
// layers
//

const char * llama_hwkv_layer_kind_name(llama_hwkv_layer_kind kind) {
    switch (kind) {
        case LLAMA_HWKV_LAYER_ATTENTION:
            return "attention";
        case LLAMA_HWKV_LAYER_SWA:
            return "swa";
        case LLAMA_HWKV_LAYER_RECURRENT:
            return "recurrent";
        case LLAMA_HWKV_LAYER_REUSE:
            return "reuse";
        case LLAMA_HWKV_LAYER_NONE:
            return "none";
    }

    GGML_ABORT("fatal error");
}

// a model with NextN layers attends only the layers below them, unless the whole model consists of such layers
static uint32_t hwkv_n_layer_main(const llama_hparams & hparams) {
    return hparams.n_layer() > 0 && hparams.router_layer < 0 ? hparams.n_layer() : hparams.n_layer_all;
}

bool llama_hwkv_layer_is_recurrent(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;

    if (!llm_arch_is_hybrid(model.arch) || il >= hwkv_n_layer_main(hparams)) {
        return false;
    }

    switch (model.arch) {
        case LLM_ARCH_FALCON_H1:
            return true;
        case LLM_ARCH_NEMOTRON_H:
        case LLM_ARCH_NEMOTRON_H_MOE:
            return hparams.is_recr(il) && hparams.n_ff(il) == 0;
        default:
            return hparams.is_recr(il);
    }
}

// the same layers as the filters of llama_model::create_memory() select
llama_hwkv_layer_kind llama_hwkv_layer_kind_of(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;

    if (il >= hwkv_n_layer_main(hparams)) {
        return LLAMA_HWKV_LAYER_NONE;
    }

    if (llama_hwkv_layer_is_recurrent(model, il) && model.arch != LLM_ARCH_FALCON_H1) {
        return LLAMA_HWKV_LAYER_RECURRENT;
    }

    if ((model.arch == LLM_ARCH_NEMOTRON_H || model.arch == LLM_ARCH_NEMOTRON_H_MOE) && hparams.n_ff(il) > 0) {
        return LLAMA_HWKV_LAYER_NONE;
    }

    if (!hparams.has_kv(il)) {
        return LLAMA_HWKV_LAYER_REUSE;
    }

    if (hparams.n_head_kv(il) == 0) {
        return LLAMA_HWKV_LAYER_NONE;
    }

    return hparams.is_swa(il) ? LLAMA_HWKV_LAYER_SWA : LLAMA_HWKV_LAYER_ATTENTION;
}

uint32_t llama_hwkv_layer_source(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;

    GGML_ASSERT(hparams.n_layer_kv_from_start >= 2);

    return hparams.n_layer_kv_from_start - (hparams.is_swa(il) ? 2 : 1);
}

std::string llama_hwkv_refusal(const llama_model & model) {
    const auto & hparams = model.hparams;

    switch (model.arch) {
        case LLM_ARCH_T5:
        case LLM_ARCH_T5ENCODER:
            return "relative position biases are not supported with per-head windows";
        case LLM_ARCH_EAGLE3:
        case LLM_ARCH_DFLASH:
        case LLM_ARCH_GEMMA4_ASSISTANT:
            return "draft models that read another model's state keep their own cache";
        case LLM_ARCH_GRANITE_SWITCH:
            return "its routing layer is read outside of attention";
        case LLM_ARCH_MINIMAX_M3:
        case LLM_ARCH_GLM_DSA:
        case LLM_ARCH_DEEPSEEK32:
        case LLM_ARCH_DEEPSEEK4:
        case LLM_ARCH_GLM5_NEXT:
        case LLM_ARCH_DOTS3NOTE:
        case LLM_ARCH_QWEN4EXP:
            return "sparse attention with an indexer keeps its own kind of cache";
        case LLM_ARCH_HY_V4:
            if (hparams.indexer_top_k > 0) {
                return "sparse attention with an indexer keeps its own kind of cache";
            }
            break;
        case LLM_ARCH_BERT:
        case LLM_ARCH_JINA_BERT_V2:
        case LLM_ARCH_JINA_BERT_V3:
        case LLM_ARCH_NOMIC_BERT:
        case LLM_ARCH_NOMIC_BERT_MOE:
        case LLM_ARCH_NEO_BERT:
        case LLM_ARCH_EUROBERT:
        case LLM_ARCH_WAVTOKENIZER_DEC:
        case LLM_ARCH_MODERN_BERT:
        case LLM_ARCH_GEMMA_EMBEDDING:
        case LLM_ARCH_DREAM:
        case LLM_ARCH_LLADA:
        case LLM_ARCH_LLADA_MOE:
        case LLM_ARCH_RND1:
            return "the model keeps no KV cache";
        default:
            break;
    }

    if (llm_arch_is_recurrent(model.arch)) {
        return "the model keeps no KV cache";
    }
    if (hparams.is_mla()) {
        return "multi-head latent attention has no KV heads to window";
    }
    if (hparams.use_alibi) {
        return "ALiBi slopes depend on the index of the head in its layer";
    }

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (llama_hwkv_layer_kind_of(model, il) == LLAMA_HWKV_LAYER_ATTENTION) {
            return "";
        }
    }

    return "the model has no global-attention layer";
}

//
// policy
//

uint64_t llama_hwkv_fnv1a(const std::string & text) {
    uint64_t h = 0xcbf29ce484222325ull;

    for (const unsigned char c : text) {
        h = (h ^ c) * 0x100000001b3ull;
    }

    return h;
}

std::string llama_hwkv_hex(uint64_t value) {
    return format("%016llx", (unsigned long long) value);
}

bool llama_hwkv_policy::is_full() const {
    for (const auto & [il, row] : rows) {
        for (const int32_t w : row) {
            if (w != LLAMA_HWKV_FULL) {
                return false;
            }
        }
    }

    return true;
}

int32_t llama_hwkv_policy::window(uint32_t il, uint32_t ih) const {
    const auto it = rows.find(il);

    return it == rows.end() ? LLAMA_HWKV_FULL : it->second.at(ih);
}

uint64_t llama_hwkv_policy::fingerprint(uint32_t n_layer) const {
    std::ostringstream ss;

    ss << "hwkv1 n_layer=" << n_layer << " n_sink=" << n_sink;

    for (const auto & [il, row] : rows) {
        if (std::all_of(row.begin(), row.end(), [](int32_t w) { return w == LLAMA_HWKV_FULL; })) {
            continue;
        }

        ss << ' ' << il << ':';

        for (size_t i = 0; i < row.size(); ++i) {
            ss << (i > 0 ? "," : "");

            if (row[i] == LLAMA_HWKV_FULL) {
                ss << "full";
            } else {
                ss << row[i];
            }
        }
    }

    return llama_hwkv_fnv1a(ss.str());
}

void llama_hwkv_policy::check(const llama_model & model) const {
    const auto & hparams = model.hparams;

    const std::string arch = model.arch_name();

    if (!architecture.empty() && architecture != arch) {
        throw std::runtime_error(
            format("%s: model.architecture is \"%s\", but the model is \"%s\": a policy of another model",
                   source.c_str(), architecture.c_str(), arch.c_str()));
    }
    if (n_layer != 0 && n_layer != hparams.n_layer_all) {
        throw std::runtime_error(
            format("%s: model.n_layer is %u, but the model has %u layers: a policy of another model", source.c_str(),
                   n_layer, hparams.n_layer_all));
    }

    for (const auto & [il, row] : rows) {
        if (il >= hparams.n_layer_all) {
            throw std::runtime_error(format("%s: layer %u does not exist, the model has layers 0 to %u", source.c_str(),
                                            il, hparams.n_layer_all - 1));
        }

        const auto kind = llama_hwkv_layer_kind_of(model, il);

        if (kind != LLAMA_HWKV_LAYER_ATTENTION) {
            static const std::map<llama_hwkv_layer_kind, const char *> why = {
                { LLAMA_HWKV_LAYER_SWA,       "it has the model's own sliding window"                               },
                { LLAMA_HWKV_LAYER_RECURRENT, "it is recurrent and keeps no K and V"                                },
                { LLAMA_HWKV_LAYER_REUSE,     "it attends the K and V of an earlier layer, whose windows it shares" },
                { LLAMA_HWKV_LAYER_NONE,      "it keeps no K and V in the main context"                             },
            };

            throw std::runtime_error(format("%s: layer %u cannot be configured: %s", source.c_str(), il, why.at(kind)));
        }

        if (row.size() != hparams.n_head_kv(il)) {
            throw std::runtime_error(format("%s: layer %u has %u KV heads, but the policy gives %zu windows",
                                            source.c_str(), il, hparams.n_head_kv(il), row.size()));
        }
    }
}

//
// readers
//

namespace {

// one reader for everything a policy file may get wrong: every message names the source and the key
struct hwkv_json_reader {
    const std::string & source;

    [[noreturn]] void fail(const std::string & key, const std::string & what) const {
        throw std::runtime_error(source + ": " + key + ": " + what);
    }

    static std::string shown(const json & value) {
        if (value.is_array()) {
            return "an array";
        }
        if (value.is_object()) {
            return "an object";
        }

        const std::string text = value.dump(-1, ' ', /* ensure_ascii = */ true);

        return text.size() > 40 ? text.substr(0, 37) + "..." : text;
    }

    int64_t integer(const json & value, const std::string & key, int64_t min, int64_t max) const {
        const bool big = value.is_number_unsigned() && value.get<uint64_t>() > (uint64_t) max;

        if (!value.is_number_integer() || big || value.get<int64_t>() < min || value.get<int64_t>() > max) {
            fail(key, format("expected an integer from %lld to %lld, got %s", (long long) min, (long long) max,
                             shown(value).c_str()));
        }

        return value.get<int64_t>();
    }

    void keys(const json &                  object,
              const std::string &           where,
              const std::set<std::string> & known,
              const std::set<std::string> & required) const {
        if (!object.is_object()) {
            fail(where, "expected an object, got " + shown(object));
        }
        for (const auto & [key, _] : object.items()) {
            if (known.count(key) == 0) {
                fail(where, "unknown key \"" + key + "\"");
            }
        }
        for (const auto & key : required) {
            if (!object.contains(key)) {
                fail(where, "the key \"" + key + "\" is missing");
            }
        }
    }
};

// nlohmann keeps the last of several equal keys; a policy with two of them is a mistake
json hwkv_parse_json(const std::string & text, const std::string & source) {
    std::vector<std::set<std::string>> keys;

    const auto callback = [&](int depth, json::parse_event_t event, json & parsed) {
        // the library copies and frees by recursion
        if (depth > 64) {
            throw std::runtime_error(source + ": nested too deep for a policy");
        }

        if (event == json::parse_event_t::object_start) {
            keys.emplace_back();
        } else if (event == json::parse_event_t::object_end) {
            keys.pop_back();
        } else if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
            throw std::runtime_error(source + ": the key \"" + parsed.get<std::string>() +
                                     "\" stands twice in one object");
        }
        return true;
    };

    try {
        return json::parse(text, callback);
    } catch (const json::exception & e) {
        throw std::runtime_error(source + ": not JSON: " + e.what());
    }
}

}  // namespace

static constexpr int64_t HWKV_MAX_WINDOW = std::numeric_limits<int32_t>::max();

// the model that a policy was made for
static void hwkv_read_model(const hwkv_json_reader & r, const json & model, llama_hwkv_policy & res) {
    r.keys(model, "model", { "architecture", "name", "n_layer", "fingerprint" }, {});

    for (const char * key : { "architecture", "name", "fingerprint" }) {
        if (model.contains(key) && !model[key].is_null() && !model[key].is_string()) {
            r.fail(std::string("model.") + key, "expected a string, got " + r.shown(model[key]));
        }
    }
    if (model.contains("architecture") && model["architecture"].is_string()) {
        res.architecture = model["architecture"];
    }
    if (model.contains("n_layer")) {
        res.n_layer = r.integer(model["n_layer"], "model.n_layer", 1, LLAMA_MAX_LAYERS);
    }
}

llama_hwkv_policy_ptr llama_hwkv_policy_from_json(const std::string & text, const std::string & source) {
    const json doc = hwkv_parse_json(text, source);

    const hwkv_json_reader r{ source };

    r.keys(doc, "policy", { "format", "version", "model", "n_sink", "layers", "provenance" },
           { "format", "version", "layers" });

    if (doc["format"] != "hwkv-policy") {
        r.fail("format", "expected \"hwkv-policy\", got " + r.shown(doc["format"]));
    }

    r.integer(doc["version"], "version", 1, 1);

    auto res = std::make_shared<llama_hwkv_policy>();

    res->source = source;

    if (doc.contains("n_sink")) {
        res->n_sink = r.integer(doc["n_sink"], "n_sink", 0, HWKV_MAX_WINDOW);
    }

    if (doc.contains("model") && !doc["model"].is_null()) {
        hwkv_read_model(r, doc["model"], *res);
    }

    if (doc.contains("provenance") && !doc["provenance"].is_null() && !doc["provenance"].is_object()) {
        r.fail("provenance", "expected an object, got " + r.shown(doc["provenance"]));
    }

    if (!doc["layers"].is_array()) {
        r.fail("layers", "expected an array, got " + r.shown(doc["layers"]));
    }

    for (size_t i = 0; i < doc["layers"].size(); ++i) {
        const json & entry = doc["layers"][i];

        const std::string where = format("layers[%zu]", i);

        r.keys(entry, where, { "layer", "windows" }, { "layer", "windows" });

        const uint32_t il = r.integer(entry["layer"], where + ".layer", 0, LLAMA_MAX_LAYERS - 1);

        if (!entry["windows"].is_array() || entry["windows"].empty()) {
            r.fail(where + ".windows", "expected an array of windows, got " + r.shown(entry["windows"]));
        }

        std::vector<int32_t> row;

        for (size_t ih = 0; ih < entry["windows"].size(); ++ih) {
            const json & w = entry["windows"][ih];

            if (w == "full") {
                row.push_back(LLAMA_HWKV_FULL);
            } else if (w.is_string()) {
                r.fail(where + format(".windows[%zu]", ih),
                       "expected \"full\" or a positive integer, got " + r.shown(w));
            } else {
                row.push_back(r.integer(w, where + format(".windows[%zu]", ih), 1, HWKV_MAX_WINDOW));
            }
        }

        if (!res->rows.emplace(il, std::move(row)).second) {
            r.fail(where + ".layer", format("layer %u stands twice", il));
        }
    }

    return res;
}

// the arrays hwkv.layers, hwkv.head_counts and hwkv.windows
static std::vector<int32_t> hwkv_gguf_i32(const gguf_context * ctx, const char * key, const std::string & source) {
    const int64_t id = gguf_find_key(ctx, key);

    if (id < 0) {
        throw std::runtime_error(format("%s: the key %s is missing", source.c_str(), key));
    }
    if (gguf_get_kv_type(ctx, id) != GGUF_TYPE_ARRAY || gguf_get_arr_type(ctx, id) != GGUF_TYPE_INT32) {
        throw std::runtime_error(format("%s: %s: expected an array of int32", source.c_str(), key));
    }

    const auto * data = (const int32_t *) gguf_get_arr_data(ctx, id);

    return std::vector<int32_t>(data, data + gguf_get_arr_n(ctx, id));
}

static bool hwkv_gguf_u32(const gguf_context * ctx, const char * key, const std::string & source, uint32_t & res) {
    const int64_t id = gguf_find_key(ctx, key);

    if (id < 0) {
        return false;
    }
    if (gguf_get_kv_type(ctx, id) != GGUF_TYPE_UINT32) {
        throw std::runtime_error(format("%s: %s: expected a uint32", source.c_str(), key));
    }

    res = gguf_get_val_u32(ctx, id);

    return true;
}

// nullptr if the GGUF has no policy
static llama_hwkv_policy_ptr hwkv_policy_from_gguf(const gguf_context * ctx, const std::string & source) {
    uint32_t version = 0;

    if (!hwkv_gguf_u32(ctx, "hwkv.version", source, version)) {
        return nullptr;
    }
    if (version != 1) {
        throw std::runtime_error(format("%s: hwkv.version is %u, this build reads version 1", source.c_str(), version));
    }

    auto res = std::make_shared<llama_hwkv_policy>();

    res->source = source;

    hwkv_gguf_u32(ctx, "hwkv.n_sink", source, res->n_sink);

    if (const int64_t id = gguf_find_key(ctx, "hwkv.model"); id >= 0) {
        if (gguf_get_kv_type(ctx, id) != GGUF_TYPE_STRING) {
            throw std::runtime_error(format("%s: hwkv.model: expected a string", source.c_str()));
        }

        const std::string where = source + ": hwkv.model";

        hwkv_read_model({ where }, hwkv_parse_json(gguf_get_val_str(ctx, id), where), *res);
    }

    const auto layers  = hwkv_gguf_i32(ctx, "hwkv.layers", source);
    const auto counts  = hwkv_gguf_i32(ctx, "hwkv.head_counts", source);
    const auto windows = hwkv_gguf_i32(ctx, "hwkv.windows", source);

    if (layers.size() != counts.size()) {
        throw std::runtime_error(format("%s: hwkv.head_counts has %zu entries, hwkv.layers has %zu", source.c_str(),
                                        counts.size(), layers.size()));
    }

    size_t offs = 0;

    for (size_t i = 0; i < layers.size(); ++i) {
        const int32_t il = layers[i];

        if (il < 0 || counts[i] <= 0 || offs + counts[i] > windows.size()) {
            throw std::runtime_error(
                format("%s: hwkv.layers[%zu] = %d with %d windows does not fit %zu entries of hwkv.windows",
                       source.c_str(), i, il, counts[i], windows.size()));
        }

        std::vector<int32_t> row(windows.begin() + offs, windows.begin() + offs + counts[i]);

        for (const int32_t w : row) {
            if (w != LLAMA_HWKV_FULL && w < 1) {
                throw std::runtime_error(
                    format("%s: hwkv.windows: layer %d: expected a positive window or -1 for full, got %d",
                           source.c_str(), il, w));
            }
        }

        if (!res->rows.emplace(il, std::move(row)).second) {
            throw std::runtime_error(format("%s: hwkv.layers: layer %d stands twice", source.c_str(), il));
        }

        offs += counts[i];
    }

    if (offs != windows.size()) {
        throw std::runtime_error(format("%s: hwkv.windows has %zu entries, hwkv.head_counts adds up to %zu",
                                        source.c_str(), windows.size(), offs));
    }

    return res;
}

llama_hwkv_policy_ptr llama_hwkv_policy_from_file(const std::string & path) {
    // far more than a policy of the largest model takes
    static constexpr size_t MAX_SIZE = 64 * 1024 * 1024;

    std::ifstream file(path, std::ios::binary);

    if (!file) {
        throw std::runtime_error(path + ": cannot open the policy file");
    }

    std::string text(4, '\0');

    file.read(&text[0], text.size());
    text.resize(file.gcount());

    if (text == GGUF_MAGIC) {
        gguf_init_params params = { /*.no_alloc =*/true, /*.ctx =*/nullptr };

        gguf_context_ptr ctx{ gguf_init_from_file(path.c_str(), params) };

        if (!ctx) {
            throw std::runtime_error(path + ": not a readable GGUF");
        }

        auto res = hwkv_policy_from_gguf(ctx.get(), path);

        if (!res) {
            throw std::runtime_error(path + ": this GGUF has no embedded policy (key hwkv.version)");
        }

        return res;
    }

    // no seeking: the policy may come through a pipe
    std::vector<char> chunk(1 << 16);

    while (file && text.size() <= MAX_SIZE) {
        file.read(chunk.data(), chunk.size());
        text.append(chunk.data(), file.gcount());
    }

    // a directory opens but cannot be read
    if (file.bad() || text.empty()) {
        throw std::runtime_error(path + ": cannot read the policy file, or it is empty");
    }
    if (text.size() > MAX_SIZE) {
        throw std::runtime_error(path + ": larger than 64 MiB, this is no policy");
    }

    return llama_hwkv_policy_from_json(text, path);
}

//
// registry
//

static std::mutex                                   hwkv_registry_mutex;
static std::map<std::string, llama_hwkv_policy_ptr> hwkv_registry;

std::string llama_hwkv_policy_register(llama_hwkv_policy_ptr policy) {
    // what the policy says, its model and where it came from: everything that a message may show
    const std::string text =
        format("%s|%s|%u|", policy->source.c_str(), policy->architecture.c_str(), policy->n_layer) +
        llama_hwkv_hex(policy->fingerprint(0));

    // rows that are all full do not change the fingerprint, but decide whether the policy fits
    std::ostringstream rows;
    for (const auto & [il, row] : policy->rows) {
        rows << il << 'x' << row.size() << ' ';
    }

    const std::string id = "@" + llama_hwkv_hex(llama_hwkv_fnv1a(text + rows.str()));

    std::lock_guard<std::mutex> lock(hwkv_registry_mutex);

    hwkv_registry[id] = std::move(policy);

    return id;
}

llama_hwkv_policy_ptr llama_hwkv_policy_registered(const std::string & id) {
    std::lock_guard<std::mutex> lock(hwkv_registry_mutex);

    const auto it = hwkv_registry.find(id);

    if (it == hwkv_registry.end()) {
        throw std::runtime_error("hwkv.policy: " + id + ": no policy of this id was registered in this process");
    }

    return it->second;
}

llama_hwkv_policy_ptr llama_hwkv_policy_load(llama_model_loader & ml, const llama_model & model) {
    if (model.hparams.vocab_only) {
        return nullptr;
    }

    std::string value = "embedded";

    // only what the user says counts here: a key of this name in the GGUF could name any file
    const auto it = ml.kv_overrides.find("hwkv.policy");

    if (it != ml.kv_overrides.end()) {
        if (it->second.tag != LLAMA_KV_OVERRIDE_TYPE_STR) {
            throw std::runtime_error(
                "the kv override hwkv.policy is not a string: expected off, embedded, a path or @<id>");
        }

        value = it->second.val_str;
    }

    if (value == "off") {
        return nullptr;
    }

    llama_hwkv_policy_ptr res = value == "embedded" ? hwkv_policy_from_gguf(ml.metadata, "embedded hwkv policy") :
                                value[0] == '@'     ? llama_hwkv_policy_registered(value) :
                                                      llama_hwkv_policy_from_file(value);

    if (res) {
        res->check(model);

        LLAMA_LOG_INFO("%s: hwkv policy %s from %s\n", __func__,
                       llama_hwkv_hex(res->fingerprint(model.hparams.n_layer_all)).c_str(), res->source.c_str());
    }

    return res;
}
