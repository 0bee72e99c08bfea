#include "llama-hwkv-sizing.h"

#include "ggml.h"
#include "llama-cparams.h"
#include "llama-hwkv-policy.h"
#include "llama-hwkv.h"

#include <algorithm>

llama_hwkv_sizing::llama_hwkv_sizing(const llama_cparams & cparams) :
    n_ctx_seq(cparams.n_ctx_seq),
    n_seq_ring(cparams.kv_unified ? cparams.n_seq_max : 1),
    n_ubatch(cparams.n_ubatch) {
    // a draft can be taken back if what decoding it recycles was masked before. the ubatch of a single sequence recycles
    //   only that, so a draft that fits into one needs no slack. beside other sequences a draft may end in a later ubatch
    //   than it began, however large ubatches are: llama_batch_allocr::split_equal() stops at the shortest sequence, and
    //   split_simple() where the ubatch is full. the later one recycles what the draft's first tokens masked
    n_slack = cparams.n_seq_max > 1 || n_ubatch < LLAMA_HWKV_N_SLACK ? LLAMA_HWKV_N_SLACK : 0;

    // a draft of n tokens is decoded with the token before it, which stays
    n_draft_max = n_slack > 0 ? n_slack : n_ubatch - 1;
}

bool llama_hwkv_sizing::is_full(int32_t window, uint32_t n_sink) const {
    return window == LLAMA_HWKV_FULL || (uint64_t) window + n_sink >= n_ctx_seq;
}

uint32_t llama_hwkv_sizing::n_cells(uint32_t window, uint32_t n_sink) const {
    const uint64_t n_cells = GGML_PAD(((uint64_t) window + n_sink + n_slack) * n_seq_ring + n_ubatch, 256);

    return std::min<uint64_t>(n_ctx_seq, n_cells);
}
