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

// so many positions beyond the windows are kept where drafts need them
#define LLAMA_HWKV_N_SLACK 64

#ifdef __cplusplus
extern "C" {
#endif

// No function throws. What fails without a place for a sentence says it in the log and returns what its comment names,
// else -1, 0 or NaN.

// Keep a policy for the lifetime of this process: from the text of a policy JSON, or from a file (JSON or GGUF).
// Writes the override value "@<id>" to id. Returns 0, or -1 with one sentence in err.
LLAMA_API int32_t llama_hwkv_register(const char * json, char * id, size_t n_id, char * err, size_t n_err);
LLAMA_API int32_t llama_hwkv_register_file(const char * path, char * id, size_t n_id, char * err, size_t n_err);

// True if the context keeps a grouped cache. False without a policy and when every window covers the context:
// such a context is exactly what it would be without this feature.
LLAMA_API bool llama_hwkv_active(const struct llama_context * ctx);

// The longest draft that can always be taken back. Meaningless if not active.
LLAMA_API int32_t llama_hwkv_n_draft_max(const struct llama_context * ctx);

// llama_memory_seq_pos_min() of the sequence after a state of it, saved now, is restored. A state holds the windows of the
// sequence's last position and no more, so this can be above llama_memory_seq_pos_min(). Meaningless if not active.
LLAMA_API llama_pos llama_hwkv_state_pos_min(const struct llama_context * ctx, llama_seq_id seq_id);

// What the context's grouped cache holds, as JSON. Returns the length of the text like snprintf, or -1.
LLAMA_API int32_t llama_hwkv_info(const struct llama_context * ctx, char * buf, size_t n);

// The same as a table for people, a line each. Empty if not active.
LLAMA_API int32_t llama_hwkv_table(const struct llama_context * ctx, char * buf, size_t n);

// Contexts that are created from now on use another policy: "off", "@<id>" of a registered one, or "calibrate", which is
// full attention with the functions below. Other threads may create contexts meanwhile: each has the old policy or the new
// one. Returns 0, or -1 with one sentence in err.
LLAMA_API int32_t llama_hwkv_select(struct llama_model * model, const char * value, char * err, size_t n_err);

// Calibration. The batch is decoded in stretches from one configurable layer to a higher one, each ending where the
// layer has stored its K and V and is about to attend. So windows can be chosen from what enters a layer, and the next
// stretch attends under them; every layer is computed once. Needs FlashAttention.

// Windows of the KV heads of a layer (-1: full), and n_sink, for the runs that start at it. All layers that such a run
// passes attend under them: let it end at the next configurable layer. Returns 0, or -1.
LLAMA_API int32_t llama_hwkv_layer_windows(struct llama_context * ctx,
                                           int32_t                layer,
                                           int32_t                n_sink,
                                           const int32_t *        windows,
                                           int32_t                n_windows);

// The tokens whose Q and attention output are captured. Returns 0, or -1.
LLAMA_API int32_t llama_hwkv_layer_samples(struct llama_context * ctx,
                                           const llama_seq_id *   seq_id,
                                           const llama_pos *      pos,
                                           int32_t                n_samples);

// Decodes the same batch as before from the attention of one layer (-1: from the start) up to that of another (-1: to the
// end). Its tokens must be in one llama_batch, without outputs. Returns 0, or -1 with one sentence in err.
LLAMA_API int32_t llama_hwkv_layer_run(struct llama_context * ctx,
                                       struct llama_batch     batch,
                                       int32_t                layer_from,
                                       int32_t                layer_to,
                                       char *                 err,
                                       size_t                 n_err);

// What the last run captured. Each returns the number of values; dst may be nullptr.
//   Q as layer_to attends with it      [n_embd_head_k, n_head, n_samples]
//   attention output of layer_from     [n_embd_head_v, n_head, n_samples]
//   learned sinks of layer_to          [n_head], or none
LLAMA_API size_t llama_hwkv_layer_q(const struct llama_context * ctx, float * dst);
LLAMA_API size_t llama_hwkv_layer_out(const struct llama_context * ctx, float * dst);
LLAMA_API size_t llama_hwkv_layer_sinks(const struct llama_context * ctx, float * dst);

// The factor of Q*K in layer_to, and the limit of its soft cap (0: none).
LLAMA_API float llama_hwkv_layer_scale(const struct llama_context * ctx);
LLAMA_API float llama_hwkv_layer_softcap(const struct llama_context * ctx);

// K and V as the cache holds them: k [n_embd_head_k, n_pos], v [n_embd_head_v, n_pos]. Returns 0, or -1 if the sequence
// does not have the positions 0 .. n_pos - 1.
LLAMA_API int32_t llama_hwkv_layer_kv(const struct llama_context * ctx,
                                      int32_t                      layer,
                                      int32_t                      head_kv,
                                      llama_seq_id                 seq_id,
                                      int32_t                      n_pos,
                                      float *                      k,
                                      float *                      v);

// Keep what the last run left, to go on from there again. Restoring returns 0, or -1 if nothing is kept under the id.
LLAMA_API int32_t llama_hwkv_layer_save(struct llama_context * ctx);
LLAMA_API int32_t llama_hwkv_layer_restore(struct llama_context * ctx, int32_t id);
LLAMA_API void    llama_hwkv_layer_drop(struct llama_context * ctx, int32_t id);

// The layers of a model and which of them a policy may configure, as JSON. Returns the length like snprintf.
LLAMA_API int32_t llama_hwkv_layers(const struct llama_model * model, char * buf, size_t n);

#ifdef __cplusplus
}
#endif
