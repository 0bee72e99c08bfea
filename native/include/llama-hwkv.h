#pragma once

// Head-wise KV windows ("hwkv"): every KV head of a global-attention layer keeps its own window of recent tokens.
// A policy says which; the KV cache then allocates only what each head keeps (see HeadWiseKV, arXiv 2609.02029).
//
// A policy reaches a model through
//   - the GGUF itself (keys hwkv.*), or
//   - the kv override "hwkv.policy" (a string) of llama_model_params:
//       "off"       ignore an embedded policy
//       "embedded"  use the embedded policy if there is one (the default)
//       "@<id>"     a policy registered in this process with one of the functions below
//       anything else is the path of a policy JSON or of a GGUF with an embedded policy

#include "llama.h"

// so many positions beyond the windows are kept where drafts need them: the longest draft is one token shorter
#define LLAMA_HWKV_N_SLACK 64

#ifdef __cplusplus
extern "C" {
#endif

    // Keep a policy for the lifetime of this process: from the text of a policy JSON, or from a file (JSON or GGUF).
    // Writes the override value "@<id>" to id. Returns 0, or -1 with one sentence in err.
    LLAMA_API int32_t llama_hwkv_register     (const char * json, char * id, size_t n_id, char * err, size_t n_err);
    LLAMA_API int32_t llama_hwkv_register_file(const char * path, char * id, size_t n_id, char * err, size_t n_err);

    // True if the context keeps a grouped cache. False without a policy and when every window covers the context:
    // such a context is exactly what it would be without this feature.
    LLAMA_API bool llama_hwkv_active(const struct llama_context * ctx);

    // What the context's grouped cache holds, as JSON. Returns the length of the text like snprintf.
    LLAMA_API int32_t llama_hwkv_info(const struct llama_context * ctx, char * buf, size_t n);

    // The same as a table for people, a line each. Empty if not active.
    LLAMA_API int32_t llama_hwkv_table(const struct llama_context * ctx, char * buf, size_t n);

    // The layers of a model and which of them a policy may configure, as JSON. Returns the length like snprintf.
    LLAMA_API int32_t llama_hwkv_layers(const struct llama_model * model, char * buf, size_t n);

#ifdef __cplusplus
}
#endif
