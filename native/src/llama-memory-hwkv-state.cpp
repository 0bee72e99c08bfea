#include "llama-impl.h"
#include "llama-io.h"
#include "llama-memory-hwkv.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>

static constexpr uint32_t HWKV_STATE_MAGIC   = 0x564b5748;  // "HWKV"
static constexpr uint32_t HWKV_STATE_VERSION = 1;

// off:     byte-identical to upstream (this class is not used)
// on:      u32 magic, u32 version, u32 partial, u64 policy fingerprint,
//          u32 n_groups, n_groups x { i32 window, u32 KV heads },
//          the groups in order (a partial state leaves out the full group), the recurrent memory
void llama_memory_hwkv::state_write_header(llama_io_write_i & io, llama_state_seq_flags flags) const {
    const uint32_t partial     = (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;
    const uint64_t fingerprint = policy->fingerprint(model.hparams.n_layer_all);
    const uint32_t n_groups    = groups.size();

    io.write(&HWKV_STATE_MAGIC, sizeof(HWKV_STATE_MAGIC));
    io.write(&HWKV_STATE_VERSION, sizeof(HWKV_STATE_VERSION));
    io.write(&partial, sizeof(partial));
    io.write(&fingerprint, sizeof(fingerprint));
    io.write(&n_groups, sizeof(n_groups));

    for (uint32_t ig = 0; ig < n_groups; ++ig) {
        const int32_t  window = groups[ig]->window;
        const uint32_t n_head = n_head_kv(ig);

        io.write(&window, sizeof(window));
        io.write(&n_head, sizeof(n_head));
    }
}

void llama_memory_hwkv::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    const bool partial = (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;

    state_write_header(io, flags);

    for (const auto & g : groups) {
        if (partial && g->swa_type == LLAMA_SWA_TYPE_NONE) {
            continue;
        }

        auto & kv = *g->kv;

        if (seq_id != -1 || g->swa_type == LLAMA_SWA_TYPE_NONE) {
            kv.state_write(io, seq_id, flags);
            continue;
        }

        // llama_kv_cache leaves out what is masked, but not when it writes all sequences: such a state would not fit into
        //   the smaller ring of a context with a smaller ubatch
        const auto cells_old = kv.copy_cells();

        for (uint32_t s = 0; s < kv.get_n_seq_max(); ++s) {
            kv.seq_rm(s, g->n_sink, g->needed(kv.seq_pos_max(s) + 1));
        }

        try {
            kv.state_write(io, seq_id, flags);
        } catch (...) {  // the caller's buffer is too small
            kv.put_back_cells(cells_old);
            throw;
        }

        kv.put_back_cells(cells_old);
    }

    if (mem_recr) {
        mem_recr->state_write(io, seq_id, flags);
    }
}

void llama_memory_hwkv::state_check_header(llama_io_read_i & io, llama_state_seq_flags flags) const {
    const auto read_u32 = [&]() {
        uint32_t res;
        io.read(&res, sizeof(res));
        return res;
    };

    if (read_u32() != HWKV_STATE_MAGIC) {
        throw std::runtime_error("the state was saved without an hwkv policy, this context has one");
    }
    if (read_u32() != HWKV_STATE_VERSION) {
        throw std::runtime_error("the state was saved by another version of hwkv");
    }

    if (read_u32() != (uint32_t) ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0)) {
        throw std::runtime_error("a partial state cannot be restored as a whole one, nor the other way round");
    }

    uint64_t fingerprint;
    io.read(&fingerprint, sizeof(fingerprint));

    if (fingerprint != policy->fingerprint(model.hparams.n_layer_all)) {
        throw std::runtime_error("the state was saved under another hwkv policy (" + llama_hwkv_hex(fingerprint) + ")");
    }

    // windows that cover the context are full, so the same policy makes other groups at another context size
    bool same = read_u32() == groups.size();

    for (uint32_t ig = 0; same && ig < groups.size(); ++ig) {
        same = read_u32() == (uint32_t) groups[ig]->window && same;
        same = read_u32() == n_head_kv(ig) && same;
    }

    if (!same) {
        throw std::runtime_error(
            "the state was saved at a context size at which other windows of the hwkv policy are full");
    }
}

void llama_memory_hwkv::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const bool partial = (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;

    state_check_header(io, flags);

    // the caches themselves leave a sequence as it is if the state has no cells for it
    if (seq_id != -1 && !partial) {
        seq_rm(seq_id, -1, -1);
    }

    try {
        for (uint32_t ig = 0; ig < groups.size(); ++ig) {
            if (partial && groups[ig]->swa_type == LLAMA_SWA_TYPE_NONE) {
                continue;
            }

            trim_shared(ig);

            groups[ig]->kv->state_read(io, seq_id, flags);
        }

        if (mem_recr) {
            mem_recr->state_read(io, seq_id, flags);
        }

        // the full group keeps its own past but not what came after the windows were saved
        if (partial && seq_id != -1) {
            const llama_pos pos_max = seq_pos_max(seq_id);

            for (auto & g : groups) {
                g->kv->seq_rm(seq_id, pos_max + 1, -1);
            }
        }
    } catch (...) {
        // leave no sequence that only some of the groups know
        for (auto & g : groups) {
            g->kv->state_clear(seq_id);
        }
        if (mem_recr) {
            // llama_memory_recurrent cannot remove all sequences
            if (seq_id == -1) {
                mem_recr->clear(true);
            } else {
                mem_recr->seq_rm(seq_id, -1, -1);
            }
        }

        throw;
    }
}

llama_pos llama_memory_hwkv::state_pos_min(llama_seq_id seq_id) const {
    llama_pos res = seq_pos_min(seq_id);

    for (const auto & g : groups) {
        const llama_pos pos_max = g->kv->seq_pos_max(seq_id);

        if (pos_max >= 0) {
            res = std::max(res, g->resumable(g->visible(pos_max)) - 1);
        }
    }

    return res;
}
