#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct llama_model;
struct llama_model_loader;

// a window that covers the whole sequence
static constexpr int32_t LLAMA_HWKV_FULL = -1;

//
// which layers a policy may configure
//

enum llama_hwkv_layer_kind {
    LLAMA_HWKV_LAYER_ATTENTION,  // global attention with its own K and V: configurable
    LLAMA_HWKV_LAYER_SWA,        // the model's own sliding window
    LLAMA_HWKV_LAYER_RECURRENT,  // recurrent or linear attention
    LLAMA_HWKV_LAYER_REUSE,      // attends K and V of an earlier layer
    LLAMA_HWKV_LAYER_NONE,       // keeps no K and V in the main context
};

const char * llama_hwkv_layer_kind_name(llama_hwkv_layer_kind kind);

llama_hwkv_layer_kind llama_hwkv_layer_kind_of(const llama_model & model, uint32_t il);

// the layer whose K and V a layer of kind REUSE attends
uint32_t llama_hwkv_layer_source(const llama_model & model, uint32_t il);

// true if the layer has a recurrent state (falcon-h1 has layers with both)
bool llama_hwkv_layer_is_recurrent(const llama_model & model, uint32_t il);

// why no policy can be served on this model, empty if one can
std::string llama_hwkv_refusal(const llama_model & model);

//
// policy
//

struct llama_hwkv_policy {
    // where it was read from, for messages: printable
    std::string source;

    // what the policy says of its model; empty if it does not
    std::string             architecture;
    std::optional<uint32_t> n_layer;

    // not a policy to serve: see llama_hwkv_calibrate()
    bool calibrate = false;

    uint32_t n_sink = 0;

    // model layer -> window of each KV head, LLAMA_HWKV_FULL or positive; layers that are not listed are full
    std::map<uint32_t, std::vector<int32_t>> rows;

    int32_t window(uint32_t il, uint32_t ih) const;

    // FNV-1a of the canonical text of the windows: equal for policies that mean the same
    uint64_t fingerprint(uint32_t n_layer) const;

    // throws with one sentence if the policy is not one for this model
    void check(const llama_model & model) const;
};

using llama_hwkv_policy_ptr = std::shared_ptr<const llama_hwkv_policy>;

uint64_t llama_hwkv_fnv1a(const std::string & text);

std::string llama_hwkv_hex(uint64_t value);

// a text of a file or a user for a terminal or a log: as escapes what is not UTF-8 or not printable, and clipped with
//   "..." if it has more than n_max characters
std::string llama_hwkv_printable(const std::string & text, size_t n_max = SIZE_MAX);

// these throw std::runtime_error with one sentence
llama_hwkv_policy_ptr llama_hwkv_policy_from_json(const std::string & text, const std::string & source);
llama_hwkv_policy_ptr llama_hwkv_policy_from_file(const std::string & path);

// keep a policy for this process; returns the value for the kv override
std::string llama_hwkv_policy_register(llama_hwkv_policy_ptr policy);

// the policy registered as "@<id>"; throws if there is none
llama_hwkv_policy_ptr llama_hwkv_policy_registered(const std::string & id);

// the policy that new contexts of a model use, nullptr for none. one thread may set it while others create contexts
llama_hwkv_policy_ptr llama_hwkv_policy_of(const llama_model & model);
void                  llama_hwkv_policy_set(llama_model & model, llama_hwkv_policy_ptr policy);

// the policy of a model that is being loaded, checked against it: from the kv override, else from the GGUF
// nullptr if there is none or it is off
llama_hwkv_policy_ptr llama_hwkv_policy_load(llama_model_loader & ml, const llama_model & model);
