#pragma once

#include "llama-graph.h"
#include "llama-memory-hwkv.h"

#include <memory>
#include <vector>

// the graph inputs of grouped attention and grouped attention itself
//
// it hangs in the input object of the memory that it stands in for (llm_graph_input_attn_kv or _kv_iswa), where
//   llm_graph_context::build_attn() finds it
class llm_graph_hwkv {
  public:
    llm_graph_hwkv(ggml_context *                    ctx0,
                   const llama_ubatch &              ubatch,
                   const llama_hparams &             hparams,
                   const llama_cparams &             cparams,
                   const llama_memory_hwkv_context * mctx);

    void set_input(const llama_ubatch * ubatch);

    // also binds the memory context of the new ubatch
    bool can_reuse(const llm_graph_params & params, const llama_memory_hwkv_context * mctx);

    // what llm_graph_context::build_attn() does, with each KV head's K and V in the cache of its window
    //   q_cur [n_embd_head_k, n_head,    n_tokens]
    //   k_cur [n_embd_head_k, n_head_kv, n_tokens] or nullptr if the layer attends an earlier layer's K and V
    //   v_cur [n_embd_head_v, n_head_kv, n_tokens] or nullptr
    //   sinks [n_head] or nullptr
    // returns  [n_embd_head_v*n_head, n_tokens], or [n_embd, n_tokens] after wo
    ggml_tensor * build_attn(const llm_graph_context & g,
                             ggml_tensor *             wo,
                             ggml_tensor *             wo_b,
                             ggml_tensor *             wo_s,
                             ggml_tensor *             q_cur,
                             ggml_tensor *             k_cur,
                             ggml_tensor *             v_cur,
                             ggml_tensor *             kq_b,
                             ggml_tensor *             sinks,
                             ggml_tensor *             v_mla,
                             float                     kq_scale,
                             int                       il) const;

  private:
    struct group {
        ggml_tensor * k_idxs  = nullptr;  // I64 [n_batch]
        ggml_tensor * v_idxs  = nullptr;  // I64 [n_batch] or [n_batch*n_embd_v_gqa]
        ggml_tensor * kq_mask = nullptr;  // F32/F16 [n_kv, n_batch/n_stream, 1, n_stream]

        // only in the first group of a kind: all groups rotate alike
        ggml_tensor * k_rot = nullptr;
        ggml_tensor * v_rot = nullptr;
    };

    std::vector<group> groups;

    // the group whose rotations a layer uses
    const group & rot_of(uint32_t il) const;

    // see llm_graph_input_attn_kv
    const llama_hparams hparams;
    const llama_cparams cparams;

    const llama_memory_hwkv_context * mctx;
};

// defined in llama-graph.cpp

ggml_tensor * build_attn_inp_kq_mask(ggml_context *                 ctx,
                                     const llama_kv_cache_context * mctx,
                                     const llama_ubatch &           ubatch,
                                     const llama_cparams &          cparams);

bool can_reuse_kq_mask(ggml_tensor *                  kq_mask,
                       const llama_kv_cache_context * mctx,
                       const llama_ubatch &           ubatch,
                       const llama_cparams &          cparams);

std::unique_ptr<llm_graph_input_rs> build_rs_inp_impl(ggml_context *                         ctx0,
                                                      const llama_ubatch &                   ubatch,
                                                      const llama_memory_recurrent_context * mctx_cur);

// the inputs of a model, see llm_graph_context::build_attn_inp_kv() and its neighbours. nullptr if mctx is not ours

std::unique_ptr<llm_graph_input_attn_kv>      llm_graph_hwkv_inp_attn_kv(const llm_graph_context & g);
std::unique_ptr<llm_graph_input_attn_kv_iswa> llm_graph_hwkv_inp_attn_kv_iswa(const llm_graph_context & g);

std::unique_ptr<llm_graph_input_mem_hybrid>      llm_graph_hwkv_inp_mem_hybrid(const llm_graph_context & g);
std::unique_ptr<llm_graph_input_mem_hybrid_iswa> llm_graph_hwkv_inp_mem_hybrid_iswa(const llm_graph_context & g);
