#pragma once

#include "llama-batch.h"
#include "llama-hwkv-footprint.h"
#include "llama-hwkv-layerwise.h"
#include "llama-hwkv-policy.h"
#include "llama-hwkv-sizing.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"

#include <memory>
#include <vector>

struct llama_cparams;

//
// llama_memory_hwkv
//

// one llama_kv_cache per distinct window. each holds, per layer, only the KV heads of that window:
//
//   policy, layer 3:  [ full, 512, 512, full ]        policy, layer 7:  [ 512, full, 1024, 512 ]
//
//   group  full  (n_ctx cells)    layer 3: heads 0 3     layer 7: head  1
//   group  512   (ring of cells)  layer 3: heads 1 2     layer 7: heads 0 3
//   group  1024  (ring of cells)                         layer 7: head  2
//
// sink tokens, the first n_sink positions of a sequence, stay in the rings as long as the sequence has them
//
// plus the model's own sliding-window cache and its recurrent memory where it has them. this one class stands in for
//   llama_kv_cache, llama_kv_cache_iswa, llama_memory_hybrid and llama_memory_hybrid_iswa

class llama_memory_hwkv : public llama_memory_i {
  public:
    // KV heads [first, first + n) of a layer
    struct run {
        uint32_t first;
        uint32_t n;
    };

    // the KV heads of a layer that are kept in one group, in ascending order
    struct part {
        uint32_t ig;
        uint32_t n_head_kv;

        std::vector<run> runs;
    };

    // the cells for each ubatch, empty if there are not enough
    struct slots {
        llama_kv_cache::slot_info_vec_t sinfos;

        // found with trim_shared() before each ubatch, which has to be repeated when they are applied
        bool trimmed = false;
    };

    // throws with one sentence if the policy cannot be served in such a context
    llama_memory_hwkv(const llama_model &         model,
                      const llama_memory_params & params,
                      const llama_cparams &       cparams,
                      llama_hwkv_policy_ptr       policy);

    ~llama_memory_hwkv() = default;

    //
    // llama_memory_i
    //

    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;

    llama_memory_context_ptr init_full() override;

    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool get_can_shift() const override;

    void clear(bool data) override;

    // false, and nothing changes, if a window no longer holds what decoding at p0 needs
    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id) override;
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;

    // virtual: the sequence can be cut back to any length L with seq_pos_min() < L <= seq_pos_max() + 1
    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    // state write/load

    void state_write(llama_io_write_i & io, llama_seq_id seq_id = -1, llama_state_seq_flags flags = 0) const override;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id = -1, llama_state_seq_flags flags = 0) override;

    //
    // llama_memory_hwkv specific API
    //

    uint32_t                 n_groups() const;
    llama_kv_cache *         get_kv(uint32_t ig) const;
    llama_memory_recurrent * get_recr() const;  // may be nullptr

    bool is_native_swa(uint32_t ig) const;

    // nullptr unless this is for calibration: then each KV head of a layer has a group of its own, with room for all, and
    //   the windows are masks only
    llama_hwkv_layerwise * get_layerwise() const;

    void set_input_kq_mask(uint32_t ig, ggml_tensor * dst, const llama_ubatch * ubatch, bool causal) const;

    // seq_pos_min() of the sequence once a state of it is restored: a state leaves out what its last position does not see
    llama_pos state_pos_min(llama_seq_id seq_id) const;

    // where the KV heads of a layer are kept
    const std::vector<part> & get_parts(uint32_t il) const;

    // upper bound for the graph nodes that grouped attention needs beyond the usual
    uint32_t n_graph_nodes() const;

    // drop the sequences from the cells that none of them can see any more but that they share:
    //   llama_kv_cache::find_slot() recycles only cells of a single sequence
    void trim_shared(uint32_t ig);

    const llama_hwkv_sizing & get_sizing() const;

    llama_hwkv_footprint footprint() const;

  private:
    struct group {
        int32_t window = LLAMA_HWKV_FULL;  // as in the policy; n_swa for the model's own sliding window

        // the policy's in groups with a window of the policy, 0 in others
        llama_pos n_sink = 0;

        bool native_swa = false;

        llama_swa_type swa_type = LLAMA_SWA_TYPE_NONE;

        // the group's KV heads per layer, 0 for layers without any. llama_kv_cache keeps a reference to it
        llama_hparams hparams;

        std::unique_ptr<llama_kv_cache> kv;

        // the lowest position that the sequence holds besides the sink tokens; -1 if there is none
        llama_pos seq_pos_min(llama_seq_id seq_id) const;

        // the lowest position that is not beyond the window at position pos, that itself counted
        llama_pos visible(llama_pos pos) const;

        // the lowest position that decoding at position p0 > 0 needs besides the sink tokens
        llama_pos needed(llama_pos p0) const;

        // the lowest L > 0 such that needed() >= pos from there on
        llama_pos resumable(llama_pos pos) const;
    };

    const llama_model &         model;
    const llama_hwkv_policy_ptr policy;

    const bool unified;

    const llama_hwkv_sizing sizing;

    const ggml_type type_k;
    const ggml_type type_v;

    // full group first, then windows ascending, then the model's own sliding window
    std::vector<std::unique_ptr<group>> groups;

    std::vector<std::vector<part>> parts;  // [n_layer_all]

    std::unique_ptr<llama_memory_recurrent> mem_recr;

    std::unique_ptr<llama_hwkv_layerwise> layerwise;

    // the layer whose K and V layer il attends
    uint32_t source_of(uint32_t il) const;

    // the window of a KV head in this context: LLAMA_HWKV_FULL if it covers the context
    int32_t window_of(uint32_t il, uint32_t ih) const;

    // in the constructor
    void make_groups();
    void make_caches(const llama_memory_params & params, const llama_cparams & cparams);

    bool can_resume(llama_seq_id seq_id, llama_pos p0) const;

    // the positions that sequence seq_id really holds in the group that holds the most
    llama_pos seq_pos_first(llama_seq_id seq_id) const;

    // KV heads of a group in all layers
    uint32_t n_head_kv(uint32_t ig) const;

    size_t row_size(uint32_t il, uint32_t n_head_kv) const;  // bytes of K and V of one cell

    void state_write_header(llama_io_write_i & io, llama_state_seq_flags flags) const;
    void state_check_header(llama_io_read_i & io, llama_state_seq_flags flags) const;

    slots prepare(uint32_t ig, const std::vector<llama_ubatch> & ubatches);

    llama_memory_context_ptr init_ubatches(std::vector<llama_ubatch> ubatches);
};

class llama_memory_hwkv_context : public llama_memory_context_i {
  public:
    // used for errors
    explicit llama_memory_hwkv_context(llama_memory_status status);

    // used to create a full-cache context
    explicit llama_memory_hwkv_context(llama_memory_hwkv * mem);

    // used to create an update context
    llama_memory_hwkv_context(llama_memory_hwkv * mem, llama_context * lctx, bool optimize);

    // used to create a batch processing context from a batch
    llama_memory_hwkv_context(llama_memory_hwkv *                   mem,
                              std::vector<llama_memory_hwkv::slots> slots,
                              std::vector<llama_ubatch>             ubatches);

    ~llama_memory_hwkv_context() = default;

    //
    // llama_memory_context_i
    //

    bool next() override;
    bool apply() override;

    llama_memory_status  get_status() const override;
    const llama_ubatch & get_ubatch() const override;

    //
    // llama_memory_hwkv_context specific API
    //

    const llama_memory_hwkv & get_mem() const;

    const llama_kv_cache_context *         get_kv(uint32_t ig) const;
    const llama_memory_recurrent_context * get_recr() const;  // may be nullptr

  private:
    llama_memory_hwkv * mem = nullptr;

    // the index of the next ubatch to process
    size_t i_next = 0;

    std::vector<llama_ubatch> ubatches;

    std::vector<llama_memory_context_ptr> ctxs_kv;  // one per group
    llama_memory_context_ptr              ctx_recr;

    std::vector<bool> trimmed;  // one per group, see llama_memory_hwkv::slots

    llama_memory_status status;

    void init_status();
};

// nullptr unless the memory is for calibration
llama_hwkv_layerwise * llama_hwkv_layerwise_of(const llama_memory_i * memory);

// the memory of a context whose policy windows anything; nullptr to go upstream's own way
// throws with one sentence if the policy cannot be served in such a context
llama_memory_i * llama_memory_hwkv_create(const llama_model &         model,
                                          const llama_memory_params & params,
                                          const llama_cparams &       cparams);
