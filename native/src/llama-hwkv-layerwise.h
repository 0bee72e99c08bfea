#pragma once

#include "ggml-cpp.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

struct llama_ubatch;

// decoding a batch a stretch of layers at a time, for calibration
//
// the graph of a ubatch is cut where a configurable layer has stored its K and V and is about to attend:
//
//   cut            first                        second                       last
//   nodes    0 .... | attention, FFN, ... Q K V | attention, ... Q K V | ... | attention, ... end
//
// a run computes the nodes between two cuts for all ubatches of the batch. what the nodes behind a cut read of the nodes
//   before it (the residual stream, Q, ...) is kept on the host in between, so that every layer is computed once, and under
//   windows that were chosen after seeing all of the Q, K and V that enter it
class llama_hwkv_layerwise {
  public:
    static constexpr int32_t NONE = -1;  // before the first node, or behind the last

    //
    // by whoever calibrates
    //

    // windows of the KV heads of a layer, LLAMA_HWKV_FULL or positive. all are full at first
    void set_windows(uint32_t il, uint32_t n_sink, std::vector<int32_t> windows);

    // the tokens whose Q and attention output are captured: (sequence, position) of each
    void set_samples(std::vector<std::pair<llama_seq_id, llama_pos>> samples);

    // the next decode computes from one cut to another. throws if what lies before the first one was not kept
    void begin(int32_t il_from, int32_t il_to);

    // after decoding: forgets what nothing needs any more
    void end();

    // go back to an earlier cut; false if it was not saved. the K and V behind it in the cache are still those of the last run
    int32_t save();
    bool    restore(int32_t id);
    void    drop(int32_t id);

    // of the last run: Q at its end [n_embd_head_k, n_head, n_samples], attention output at its start [n_embd_head_v*n_head, n_samples]
    struct attention {
        std::vector<float> q;
        std::vector<float> out;
        std::vector<float> sinks;  // [n_head], empty if the layer has none

        float scale = 1.0f;
    };

    const attention & get() const;

    //
    // by the graph: where the cuts are
    //

    void graph_begin();
    void on_stored(uint32_t il, int i_node, ggml_tensor * q, ggml_tensor * sinks, float scale);
    void on_attended(uint32_t il, ggml_tensor * out);

    //
    // by the memory
    //

    // the windows that the attention of the run has to mask, see set_windows()
    int32_t  window(uint32_t ih) const;
    uint32_t n_sink() const;

    //
    // by the context, around the computation of each ubatch
    //

    ggml_cgraph * slice(ggml_cgraph * gf);
    void          load();
    void          store(const llama_ubatch & ubatch);

  private:
    struct cut {
        int i_node = 0;

        ggml_tensor * q     = nullptr;  // [n_embd_head_k, n_head, n_tokens]
        ggml_tensor * sinks = nullptr;  // [n_head]
        ggml_tensor * out   = nullptr;  // [n_embd_head_v*n_head, n_tokens]

        float scale = 1.0f;
    };

    // ubatch, node and its name: the same graph is built for a ubatch in every run
    using key = std::tuple<int, int, std::string>;

    using kept = std::map<key, std::shared_ptr<const std::vector<uint8_t>>>;

    struct row {
        uint32_t n_sink = 0;

        std::vector<int32_t> windows;
    };

    std::map<uint32_t, row>                                           rows;
    std::map<std::pair<llama_seq_id, llama_pos>, std::vector<size_t>> samples;  // -> indices
    size_t                                                            n_samples = 0;

    bool    active  = false;
    int32_t il_from = NONE;
    int32_t il_to   = NONE;
    int     iu      = 0;  // ubatch of the run

    kept                    state;
    std::set<key>           needed;  // by what lies behind the end of the run
    std::map<int32_t, kept> saved;
    int32_t                 id_next = 0;

    attention result;

    // of the ubatch's graph
    std::map<uint32_t, cut>                    cuts;
    std::vector<std::pair<int, ggml_tensor *>> live_in;  // node, tensor
    std::vector<std::pair<int, ggml_tensor *>> live_out;
    ggml_context_ptr                           ctx;

    const cut * cut_of(int32_t il) const;

    key key_of(int i_node, const ggml_tensor * t) const;

    void capture(const llama_ubatch & ubatch, const ggml_tensor * t, int dim, std::vector<float> & dst) const;
};
