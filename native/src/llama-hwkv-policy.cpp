#include "llama-hwkv-policy.h"

#include "../vendor/nlohmann/json.hpp"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-model.h"
#include "unicode.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>

//
// messages
//

static bool hwkv_is_printable(uint32_t cpt) {
    const auto flags = unicode_cpt_flags_from_cpt(cpt);

    return cpt == ' ' || (!flags.is_control && !flags.is_separator);
}

std::string llama_hwkv_printable(const std::string & text, size_t n_max) {
    std::string res;

    size_t i_clip = 0;  // where the text ends if it has to be clipped
    size_t n      = 0;  // characters of the text

    for (size_t i = 0; i < text.size(); ++n) {
        if (n + 3 == n_max) {
            i_clip = res.size();
        }
        if (n == n_max) {
            return res.substr(0, i_clip) + "...";
        }

        size_t end = i;

        try {
            const uint32_t cpt = unicode_cpt_from_utf8(text, end);

            res += hwkv_is_printable(cpt) ? text.substr(i, end - i) : format(cpt < 0x100 ? "\\x%02x" : "\\u%04x", cpt);
        } catch (const std::invalid_argument &) {
            end = i + 1;
            res += format("\\x%02x", (unsigned char) text[i]);
        }

        i = end;
    }

    return res;
}

// a value, or the name of a key, in a message
static std::string hwkv_clip(const std::string & text) {
    return llama_hwkv_printable(text, 60);
}

// source is printable; of a long path the end tells more
[[noreturn]] static void hwkv_fail(const std::string & source, const std::string & what) {
    static constexpr size_t N_MAX = 300;

    const std::string where =
        source.size() <= N_MAX ? source : "..." + llama_hwkv_printable(source.substr(source.size() - N_MAX));

    throw std::runtime_error(where + ": " + llama_hwkv_printable(what, 400));
}

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
        hwkv_fail(source, "model.architecture is \"" + hwkv_clip(architecture) + "\", but the model is \"" + arch +
                              "\": a policy of another model");
    }
    if (n_layer && *n_layer != hparams.n_layer_all) {
        hwkv_fail(source, format("model.n_layer is %u, but the model has %u layers: a policy of another model",
                                 *n_layer, hparams.n_layer_all));
    }

    for (const auto & [il, row] : rows) {
        if (il >= hparams.n_layer_all) {
            hwkv_fail(source,
                      format("layer %u does not exist, the model has layers 0 to %u", il, hparams.n_layer_all - 1));
        }

        const auto kind = llama_hwkv_layer_kind_of(model, il);

        if (kind != LLAMA_HWKV_LAYER_ATTENTION) {
            static const std::map<llama_hwkv_layer_kind, const char *> why = {
                { LLAMA_HWKV_LAYER_SWA,       "it has the model's own sliding window"                               },
                { LLAMA_HWKV_LAYER_RECURRENT, "it is recurrent and keeps no K and V"                                },
                { LLAMA_HWKV_LAYER_REUSE,     "it attends the K and V of an earlier layer, whose windows it shares" },
                { LLAMA_HWKV_LAYER_NONE,      "it keeps no K and V in the main context"                             },
            };

            hwkv_fail(source, format("layer %u cannot be configured: %s", il, why.at(kind)));
        }

        if (row.size() != hparams.n_head_kv(il)) {
            hwkv_fail(source, format("layer %u has %u KV heads, but the policy gives %zu windows", il,
                                     hparams.n_head_kv(il), row.size()));
        }
    }
}

//
// readers
//
// the same verdicts as hwkv_llamacpp/policy/policy.py and gguf/embed.py, and the same words where that is possible:
//   tests/data/verdicts.py is the table that both are tested with
//

static constexpr size_t  HWKV_MAX_BYTES   = 1024 * 1024;  // of a policy's JSON: some times what the largest model takes
static constexpr size_t  HWKV_MAX_ENTRIES = 65536;        // of an array in a GGUF
static constexpr size_t  HWKV_MAX_DEPTH   = 64;           // the JSON library copies and frees by recursion
static constexpr int64_t HWKV_MAX_INTEGER = std::numeric_limits<int32_t>::max();

namespace {

// keys sorted: an ordered object of this library searches all of its keys for every new one
using hwkv_json = nlohmann::json;

std::string hwkv_shown(const hwkv_json & value) {
    return hwkv_clip(value.dump());
}

// the values of one JSON text: every message names the source and the key
struct hwkv_json_reader {
    const std::string & source;

    [[noreturn]] void fail(const std::string & key, const hwkv_json & value, const std::string & expected) const {
        hwkv_fail(source, "key '" + key + "' is " + hwkv_shown(value) + ", " + expected + " expected");
    }

    int64_t integer(const hwkv_json &   value,
                    const std::string & key,
                    int64_t             min,
                    int64_t             max,
                    const std::string & expected = "") const {
        const bool big = value.is_number_unsigned() && value.get<uint64_t>() > (uint64_t) max;

        if (!value.is_number_integer() || big || value.get<int64_t>() < min || value.get<int64_t>() > max) {
            fail(
                key, value,
                expected.empty() ? format("an integer from %lld to %lld", (long long) min, (long long) max) : expected);
        }

        return value.get<int64_t>();
    }

    // the keys of an object. inside: its own key and a point
    void keys(const hwkv_json &                 object,
              const std::string &               inside,
              const std::vector<const char *> & known,
              const std::vector<const char *> & required) const {
        for (const auto & [key, _] : object.items()) {
            if (std::find(known.begin(), known.end(), key) == known.end()) {
                std::string list;
                for (const char * name : known) {
                    list += std::string(list.empty() ? "" : ", ") + name;
                }
                hwkv_fail(source, "key '" + inside + hwkv_clip(key) + "' is unknown; known are " + list);
            }
        }
        for (const char * name : required) {
            if (!object.contains(name)) {
                hwkv_fail(source, "key '" + inside + name + "' is missing");
            }
        }
    }
};

hwkv_json hwkv_parse_json(const std::string & text, const std::string & source, size_t max_depth) {
    if (text.size() > HWKV_MAX_BYTES) {
        hwkv_fail(source, format("not a policy: it has %zu bytes, at most %zu expected", text.size(), HWKV_MAX_BYTES));
    }

    // the library skips the one, and ends at the other
    if (text.compare(0, 3, "\xef\xbb\xbf") == 0) {
        hwkv_fail(source, "not JSON: it starts with a byte-order mark");
    }
    if (const size_t i = text.find('\0'); i != std::string::npos) {
        hwkv_fail(source, format("not JSON: byte %zu is NUL", i));
    }

    // the library keeps the last of several equal keys; a policy with two of them is a mistake
    std::vector<std::set<std::string>> keys;

    const auto callback = [&](int depth, hwkv_json::parse_event_t event, hwkv_json & parsed) {
        using event_t = hwkv_json::parse_event_t;

        if ((event == event_t::object_start || event == event_t::array_start) && (size_t) depth >= max_depth) {
            hwkv_fail(source, format("its JSON is nested too deeply: at most %zu levels expected", max_depth));
        }

        if (event == event_t::object_start) {
            keys.emplace_back();
        } else if (event == event_t::object_end) {
            keys.pop_back();
        } else if (event == event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
            hwkv_fail(source, "key '" + hwkv_clip(parsed.get<std::string>()) + "' occurs twice in one JSON object");
        }
        return true;
    };

    try {
        return hwkv_json::parse(text, callback);
    } catch (const hwkv_json::out_of_range &) {
        hwkv_fail(source, "not JSON: a number is too large");
    } catch (const hwkv_json::parse_error & e) {
        const size_t end   = std::min(text.size(), e.byte > 0 ? e.byte - 1 : 0);
        const size_t line  = 1 + std::count(text.begin(), text.begin() + end, '\n');
        const size_t start = end > 0 ? text.rfind('\n', end - 1) + 1 : 0;  // npos + 1 is 0

        hwkv_fail(source, format("not JSON: syntax error at line %zu column %zu", line, end - start + 1));
    }
}

// what a policy says of the model that it was made for
void hwkv_read_model(const hwkv_json_reader & r,
                     const hwkv_json &        model,
                     const std::string &      inside,
                     llama_hwkv_policy &      res) {
    r.keys(model, inside, { "architecture", "name", "n_layer", "fingerprint" }, {});

    if (model.contains("architecture")) {
        if (!model["architecture"].is_string() || model["architecture"] == "") {
            r.fail(inside + "architecture", model["architecture"], "a text that is not empty");
        }
        res.architecture = model["architecture"];
    }
    if (model.contains("name") && !model["name"].is_string()) {
        r.fail(inside + "name", model["name"], "a text");
    }
    if (model.contains("n_layer")) {
        res.n_layer = r.integer(model["n_layer"], inside + "n_layer", 0, HWKV_MAX_INTEGER);
    }
    if (model.contains("fingerprint")) {
        // the tools compare it: it is a hash of what they read of the model's shape
        const auto & value = model["fingerprint"];
        const auto   text  = value.is_string() ? value.get<std::string>() : "";

        if (text.empty() || text.size() > 64 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
            r.fail(inside + "fingerprint", value, "1 to 64 hex digits");
        }
    }
}

}  // namespace

llama_hwkv_policy_ptr llama_hwkv_policy_from_json(const std::string & text, const std::string & source) {
    auto res = std::make_shared<llama_hwkv_policy>();

    res->source = llama_hwkv_printable(source);

    const hwkv_json doc = hwkv_parse_json(text, res->source, HWKV_MAX_DEPTH);

    const hwkv_json_reader r{ res->source };

    if (!doc.is_object()) {
        hwkv_fail(res->source, "holds " + hwkv_shown(doc) + ", a JSON object expected");
    }

    r.keys(doc, "", { "format", "version", "model", "n_sink", "layers", "provenance" },
           { "format", "version", "layers" });

    if (doc["format"] != "hwkv-policy") {
        r.fail("format", doc["format"], "\"hwkv-policy\"");
    }

    r.integer(doc["version"], "version", 1, 1, "1");

    if (doc.contains("model") && !doc["model"].is_null()) {
        if (!doc["model"].is_object()) {
            r.fail("model", doc["model"], "a JSON object");
        }
        hwkv_read_model(r, doc["model"], "model.", *res);
    }

    if (doc.contains("n_sink")) {
        res->n_sink = r.integer(doc["n_sink"], "n_sink", 0, HWKV_MAX_INTEGER);
    }

    if (doc.contains("provenance") && !doc["provenance"].is_null() && !doc["provenance"].is_object()) {
        r.fail("provenance", doc["provenance"], "a JSON object");
    }

    const hwkv_json & layers = doc["layers"];

    if (!layers.is_array()) {
        r.fail("layers", layers, "a list");
    }

    const std::string window_expected = format("\"full\" or 1 to %lld tokens", (long long) HWKV_MAX_INTEGER);

    for (size_t i = 0; i < layers.size(); ++i) {
        const std::string where = format("layers[%zu]", i);

        if (!layers[i].is_object()) {
            r.fail(where, layers[i], "a JSON object");
        }

        r.keys(layers[i], where + ".", { "layer", "windows" }, { "layer", "windows" });

        const uint32_t il = r.integer(layers[i]["layer"], where + ".layer", 0, HWKV_MAX_INTEGER);

        const hwkv_json & windows = layers[i]["windows"];

        if (!windows.is_array() || windows.empty()) {
            r.fail(where + ".windows", windows, "a list of one window per KV head");
        }

        std::vector<int32_t> row;

        for (size_t ih = 0; ih < windows.size(); ++ih) {
            row.push_back(windows[ih] == "full" ? LLAMA_HWKV_FULL :
                                                  r.integer(windows[ih], where + format(".windows[%zu]", ih), 1,
                                                            HWKV_MAX_INTEGER, window_expected));
        }

        if (!res->rows.emplace(il, std::move(row)).second) {
            hwkv_fail(res->source, format("key '%s.layer' lists layer %u a second time", where.c_str(), il));
        }
    }

    return res;
}

//
// GGUF
//

template <typename T> static void hwkv_append(const void * data, size_t n, hwkv_json & res) {
    for (size_t i = 0; i < n; ++i) {
        res.push_back(((const T *) data)[i]);
    }
}

// an integer or an array of them as a JSON array. writers of GGUF choose the type that they like, so any will do
static hwkv_json hwkv_gguf_integers(const gguf_context * ctx,
                                    const char *         key,
                                    const std::string &  source,
                                    bool                 array) {
    const char * expected = array ? "integers" : "an integer";

    const int64_t id = gguf_find_key(ctx, key);

    if (id < 0) {
        hwkv_fail(source, format("key '%s' is missing", key));
    }

    const bool      is_array = gguf_get_kv_type(ctx, id) == GGUF_TYPE_ARRAY;
    const gguf_type type     = is_array ? gguf_get_arr_type(ctx, id) : gguf_get_kv_type(ctx, id);
    const size_t    n        = is_array ? gguf_get_arr_n(ctx, id) : 1;

    const auto data = [&] {
        return is_array ? gguf_get_arr_data(ctx, id) : gguf_get_val_data(ctx, id);
    };

    if (is_array == array && n > HWKV_MAX_ENTRIES) {
        hwkv_fail(source, format("key '%s' has %zu entries, at most %zu expected", key, n, HWKV_MAX_ENTRIES));
    }

    hwkv_json res = hwkv_json::array();

    if (is_array == array && n > 0) {
        switch (type) {
            case GGUF_TYPE_UINT8:
                hwkv_append<uint8_t>(data(), n, res);
                return res;
            case GGUF_TYPE_INT8:
                hwkv_append<int8_t>(data(), n, res);
                return res;
            case GGUF_TYPE_UINT16:
                hwkv_append<uint16_t>(data(), n, res);
                return res;
            case GGUF_TYPE_INT16:
                hwkv_append<int16_t>(data(), n, res);
                return res;
            case GGUF_TYPE_UINT32:
                hwkv_append<uint32_t>(data(), n, res);
                return res;
            case GGUF_TYPE_INT32:
                hwkv_append<int32_t>(data(), n, res);
                return res;
            case GGUF_TYPE_UINT64:
                hwkv_append<uint64_t>(data(), n, res);
                return res;
            case GGUF_TYPE_INT64:
                hwkv_append<int64_t>(data(), n, res);
                return res;
            default:
                break;
        }
    }
    if (is_array == array && n == 0) {
        return res;
    }

    hwkv_fail(source, format("key '%s' is of another type, %s expected", key, expected));
}

// a key whose text is a JSON object, or null
static hwkv_json hwkv_gguf_object(const gguf_context * ctx, const char * key, const std::string & source) {
    const int64_t id = gguf_find_key(ctx, key);

    if (id < 0) {
        return nullptr;
    }
    if (gguf_get_kv_type(ctx, id) != GGUF_TYPE_STRING) {
        hwkv_fail(source, format("key '%s' is of another type, a string expected", key));
    }

    const std::string where = source + format(": key '%s'", key);

    // in a policy file it stands one level deeper
    hwkv_json res = hwkv_parse_json(gguf_get_val_str(ctx, id), where, HWKV_MAX_DEPTH - 1);

    if (!res.is_object() && !res.is_null()) {
        hwkv_fail(where, "holds " + hwkv_shown(res) + ", a JSON object expected");
    }

    return res;
}

// nullptr if the GGUF has no policy
static llama_hwkv_policy_ptr hwkv_policy_from_gguf(const gguf_context * ctx, const std::string & source_raw) {
    static constexpr const char * KEYS[] = { "hwkv.version", "hwkv.n_sink",  "hwkv.layers", "hwkv.head_counts",
                                             "hwkv.windows", "hwkv.summary", "hwkv.model",  "hwkv.provenance" };

    if (std::none_of(std::begin(KEYS), std::end(KEYS),
                     [&](const char * key) { return gguf_find_key(ctx, key) >= 0; })) {
        return nullptr;
    }

    auto res = std::make_shared<llama_hwkv_policy>();

    res->source = llama_hwkv_printable(source_raw);

    const std::string & source = res->source;

    const hwkv_json_reader r{ source };

    r.integer(hwkv_gguf_integers(ctx, "hwkv.version", source, false)[0], "hwkv.version", 1, 1, "1");

    if (gguf_find_key(ctx, "hwkv.n_sink") >= 0) {
        res->n_sink =
            r.integer(hwkv_gguf_integers(ctx, "hwkv.n_sink", source, false)[0], "hwkv.n_sink", 0, HWKV_MAX_INTEGER);
    }

    const auto layers  = hwkv_gguf_integers(ctx, "hwkv.layers", source, true);
    const auto counts  = hwkv_gguf_integers(ctx, "hwkv.head_counts", source, true);
    const auto windows = hwkv_gguf_integers(ctx, "hwkv.windows", source, true);

    size_t n_windows = 0;

    for (size_t i = 0; i < counts.size(); ++i) {
        n_windows += r.integer(counts[i], format("hwkv.head_counts[%zu]", i), 1, HWKV_MAX_ENTRIES);
    }

    if (layers.size() != counts.size() || windows.size() != n_windows) {
        hwkv_fail(source, format("key 'hwkv.head_counts' has %zu counts that sum to %zu, %zu that sum to %zu expected",
                                 counts.size(), n_windows, layers.size(), windows.size()));
    }

    const std::string window_expected = format("-1 for full or 1 to %lld tokens", (long long) HWKV_MAX_INTEGER);

    size_t iw = 0;

    for (size_t i = 0; i < layers.size(); ++i) {
        const uint32_t il = r.integer(layers[i], format("hwkv.layers[%zu]", i), 0, HWKV_MAX_INTEGER);

        std::vector<int32_t> row;

        for (const size_t end = iw + counts[i].get<size_t>(); iw < end; ++iw) {
            // for the library 2^64 - 1 equals -1
            const bool full = !windows[iw].is_number_unsigned() && windows[iw] == LLAMA_HWKV_FULL;

            row.push_back(
                full ? LLAMA_HWKV_FULL :
                       r.integer(windows[iw], format("hwkv.windows[%zu]", iw), 1, HWKV_MAX_INTEGER, window_expected));
        }

        if (!res->rows.emplace(il, std::move(row)).second) {
            hwkv_fail(source, format("key 'hwkv.layers[%zu]' lists layer %u a second time", i, il));
        }
    }

    if (const auto model = hwkv_gguf_object(ctx, "hwkv.model", source); !model.is_null()) {
        const std::string where = source + ": key 'hwkv.model'";

        hwkv_read_model({ where }, model, "", *res);
    }

    hwkv_gguf_object(ctx, "hwkv.provenance", source);  // for people: only its form is checked

    return res;
}

llama_hwkv_policy_ptr llama_hwkv_policy_from_file(const std::string & path) {
    const std::string source = llama_hwkv_printable(path);

    std::ifstream file(path, std::ios::binary);

    if (!file) {
        hwkv_fail(source, "cannot open the policy file");
    }

    std::string text(4, '\0');

    file.read(&text[0], text.size());
    text.resize(file.gcount());

    if (text == GGUF_MAGIC) {
        gguf_init_params params = { /*.no_alloc =*/true, /*.ctx =*/nullptr };

        gguf_context_ptr ctx{ gguf_init_from_file(path.c_str(), params) };

        if (!ctx) {
            hwkv_fail(source, "not a readable GGUF");
        }

        auto res = hwkv_policy_from_gguf(ctx.get(), path);

        if (!res) {
            hwkv_fail(source, "has no embedded policy");
        }

        return res;
    }

    // no seeking: the policy may come through a pipe
    std::vector<char> chunk(1 << 16);

    while (file && text.size() <= HWKV_MAX_BYTES) {
        file.read(chunk.data(), chunk.size());
        text.append(chunk.data(), file.gcount());
    }

    // a directory opens but cannot be read
    if (file.bad() || text.empty()) {
        hwkv_fail(source, "cannot read the policy file, or it is empty");
    }
    if (text.size() > HWKV_MAX_BYTES) {
        // of a pipe or a device nobody knows
        std::error_code ec;
        const auto      size = std::filesystem::file_size(path, ec);

        hwkv_fail(source, format("not a policy: it has %s bytes, at most %zu expected",
                                 ec ? "more" : std::to_string(size).c_str(), HWKV_MAX_BYTES));
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
    const std::string text = policy->source + "|" + policy->architecture + "|" +
                             (policy->n_layer ? std::to_string(*policy->n_layer) : "") + "|" +
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
        hwkv_fail("hwkv.policy", hwkv_clip(id) + ": no policy of this id was registered in this process");
    }

    return it->second;
}

//
// the policy of a model
//

llama_hwkv_policy_ptr llama_hwkv_policy_of(const llama_model & model) {
    return std::atomic_load(&model.hwkv);
}

void llama_hwkv_policy_set(llama_model & model, llama_hwkv_policy_ptr policy) {
    std::atomic_store(&model.hwkv, std::move(policy));
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
