#pragma once

#include <cstdint>

struct llama_cparams;

// how many cells a window takes in a context
//
//   full    n_ctx_seq
//   w       (w + n_sink + n_slack)*n_seq_ring + n_ubatch, padded to 256, at most n_ctx_seq
//
// hwkv plan foretells the bytes with the same rule
struct llama_hwkv_sizing {
    explicit llama_hwkv_sizing(const llama_cparams & cparams);

    uint32_t n_ctx_seq;   // positions of one sequence
    uint32_t n_seq_ring;  // sequences that share a ring
    uint32_t n_ubatch;

    // positions of each sequence that stay beyond the window, so that drafts can be taken back
    uint32_t n_slack;

    // the longest draft that can always be taken back
    uint32_t n_draft_max;

    // no query of such a context is beyond the window
    bool is_full(int32_t window, uint32_t n_sink) const;

    uint32_t n_cells(uint32_t window, uint32_t n_sink) const;
};
