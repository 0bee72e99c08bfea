#pragma once

#ifndef __cplusplus
#    error "This header is for C++ only"
#endif

// what the tools need to offer --hwkv-policy

#include "llama-hwkv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#define LLAMA_HWKV_OVERRIDE_KEY "hwkv.policy"

// the argument of --hwkv-policy -> the value of the kv override; a file is read and checked here, and not again: it may be
//   a pipe, or change while the program runs. so call it once for an argument, and keep what it returns
// empty (an environment variable that is set to nothing): as if it were not given
// throws std::invalid_argument with one sentence
inline std::string llama_hwkv_policy_arg(const std::string & value) {
    if (value.empty() || value == "off" || value == "embedded" || value[0] == '@') {
        return value;
    }

    char id[64];
    char err[1024];

    if (llama_hwkv_register_file(value.c_str(), id, sizeof(id), err, sizeof(err)) != 0) {
        throw std::invalid_argument(err);
    }

    return id;
}

// put the override into a list that ends with an empty key (or is empty); may be called again with another value
inline void llama_hwkv_policy_override(std::vector<llama_model_kv_override> & overrides, const std::string & value) {
    if (value.empty()) {
        return;
    }

    overrides.erase(
        std::remove_if(overrides.begin(), overrides.end(),
                       [](const llama_model_kv_override & o) { return strcmp(o.key, LLAMA_HWKV_OVERRIDE_KEY) == 0; }),
        overrides.end());

    if (value == "embedded") {
        return;
    }

    llama_model_kv_override o = {};

    o.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    strncpy(o.key, LLAMA_HWKV_OVERRIDE_KEY, sizeof(o.key) - 1);
    strncpy(o.val_str, value.c_str(), sizeof(o.val_str) - 1);

    overrides.insert(overrides.begin(), o);

    if (overrides.back().key[0] != 0) {
        overrides.push_back({});
    }
}

// llama_hwkv_info or llama_hwkv_table as a string
inline std::string llama_hwkv_str(int32_t (*get)(const llama_context *, char *, size_t), const llama_context * ctx) {
    std::string res(std::max(0, get(ctx, nullptr, 0)), '\0');

    get(ctx, &res[0], res.size() + 1);

    return res;
}

inline std::string llama_hwkv_info_str(const llama_context * ctx) {
    return llama_hwkv_str(llama_hwkv_info, ctx);
}
