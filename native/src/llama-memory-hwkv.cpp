#include "llama-memory-hwkv.h"

#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <set>
#include <stdexcept>

//
// llama_memory_hwkv::group
//

llama_pos llama_memory_hwkv::group::seq_pos_min(llama_seq_id seq_id) const {
    const auto & seq_pos = kv->get_cells(seq_id).seq_pos_get(seq_id);
    const auto   it      = seq_pos.lower_bound({ n_sink, 0 });

    return it == seq_pos.end() ? -1 : it->first;
}

llama_pos llama_memory_hwkv::group::visible(llama_pos pos) const {
    switch (swa_type) {
        case LLAMA_SWA_TYPE_NONE:
            return 0;
        case LLAMA_SWA_TYPE_CHUNKED:
            return (pos / window) * window;
        case LLAMA_SWA_TYPE_STANDARD:
        case LLAMA_SWA_TYPE_SYMMETRIC:
            return std::max(0, pos - window + 1);
    }

    GGML_ABORT("unknown kind of window");
}

llama_pos llama_memory_hwkv::group::needed(llama_pos p0) const {
    // it sees sink tokens only
    if (p0 <= n_sink) {
        return std::numeric_limits<llama_pos>::max();
    }

    // at least the predecessor, so that a group never runs empty before the others
    return std::max(n_sink, std::min(visible(p0), p0 - 1));
}

llama_pos llama_memory_hwkv::group::resumable(llama_pos pos) const {
    if (pos <= n_sink) {
        return 1;
    }

    llama_pos res = pos + 1;

    switch (swa_type) {
        case LLAMA_SWA_TYPE_NONE:
            return 1;
        case LLAMA_SWA_TYPE_CHUNKED:
            res = ((pos + window - 1) / window) * window;
            break;
        case LLAMA_SWA_TYPE_STANDARD:
        case LLAMA_SWA_TYPE_SYMMETRIC:
            res = pos + window - 1;
            break;
    }

    return std::max(res, pos + 1);
}

//
// llama_memory_hwkv
//

llama_memory_hwkv::llama_memory_hwkv(const llama_model &         model,
                                     const llama_memory_params & params,
                                     const llama_cparams &       cparams,
                                     llama_hwkv_policy_ptr       policy_in) :
    model(model),
    policy(std::move(policy_in)),
    unified(cparams.kv_unified),
    sizing(cparams),
    type_k(params.type_k),
    type_v(params.type_v) {
    if (policy->calibrate) {
        layerwise = std::make_unique<llama_hwkv_layerwise>();
    }

    make_groups();
    make_caches(params, cparams);

    for (const auto & line : llama_hwkv_footprint_table(footprint())) {
        LLAMA_LOG_INFO("%s: %s\n", __func__, line.c_str());
    }
}

uint32_t llama_memory_hwkv::source_of(uint32_t il) const {
    return llama_hwkv_layer_kind_of(model, il) == LLAMA_HWKV_LAYER_REUSE ? llama_hwkv_layer_source(model, il) : il;
}

int32_t llama_memory_hwkv::window_of(uint32_t il, uint32_t ih) const {
    const int32_t w = policy->window(il, ih);

    return sizing.is_full(w, policy->n_sink) ? LLAMA_HWKV_FULL : w;
}

// upstream allocates one cache with all KV heads. here, every window has its own with the KV heads of that window:
//   n_head_kv_arr is set to them, and to 0 for all other layers, so that also the padding of V to the widest layer
//   (without FlashAttention) considers this group's layers only
void llama_memory_hwkv::make_groups() {
    const auto & hparams = model.hparams;

    const uint32_t n_layer = hparams.n_layer_all;

    // what a group has in common; for calibration each KV head of a layer has a group of its own
    const auto key_of = [&](uint32_t il, uint32_t ih) {
        return layerwise ? (int32_t) ih : window_of(il, ih);
    };

    bool has_swa = false;

    std::set<int32_t> keys;  // LLAMA_HWKV_FULL sorts first

    for (uint32_t il = 0; il < n_layer; ++il) {
        const auto kind = llama_hwkv_layer_kind_of(model, il);

        has_swa = has_swa || kind == LLAMA_HWKV_LAYER_SWA;

        if (kind == LLAMA_HWKV_LAYER_ATTENTION) {
            for (uint32_t ih = 0; ih < hparams.n_head_kv(il); ++ih) {
                keys.insert(key_of(il, ih));
            }
        }
    }

    parts.resize(n_layer);

    const auto add_head = [&](uint32_t il, uint32_t ih) {
        const uint32_t ig = groups.size() - 1;

        if (parts[il].empty() || parts[il].back().ig != ig) {
            parts[il].push_back({ ig, 0, {} });
        }

        auto & p = parts[il].back();

        if (p.runs.empty() || p.runs.back().first + p.runs.back().n != ih) {
            p.runs.push_back({ ih, 0 });
        }

        p.runs.back().n++;
        p.n_head_kv++;
    };

    for (const int32_t key : keys) {
        groups.push_back(std::make_unique<group>());

        auto & g = *groups.back();

        g.window  = layerwise ? LLAMA_HWKV_FULL : key;
        g.hparams = hparams;

        if (g.window != LLAMA_HWKV_FULL) {
            g.n_sink   = policy->n_sink;
            g.swa_type = LLAMA_SWA_TYPE_STANDARD;
        }

        g.hparams.n_head_kv_arr.fill(0);

        for (uint32_t il = 0; il < n_layer; ++il) {
            const uint32_t il_src = source_of(il);

            if (llama_hwkv_layer_kind_of(model, il_src) != LLAMA_HWKV_LAYER_ATTENTION) {
                continue;
            }

            for (uint32_t ih = 0; ih < hparams.n_head_kv(il_src); ++ih) {
                if (key_of(il_src, ih) == key) {
                    add_head(il, ih);

                    g.hparams.n_head_kv_arr[il]++;
                }
            }
        }
    }

    if (has_swa) {
        groups.push_back(std::make_unique<group>());

        auto & g = *groups.back();

        g.window     = hparams.n_swa;
        g.native_swa = true;
        g.swa_type   = hparams.swa_type;
        g.hparams    = hparams;

        for (uint32_t il = 0; il < n_layer; ++il) {
            const uint32_t il_src = source_of(il);

            if (llama_hwkv_layer_kind_of(model, il_src) == LLAMA_HWKV_LAYER_SWA) {
                for (uint32_t ih = 0; ih < hparams.n_head_kv(il_src); ++ih) {
                    add_head(il, ih);
                }
            }
        }
    }
}

void llama_memory_hwkv::make_caches(const llama_memory_params & params, const llama_cparams & cparams) {
    const auto & hparams = model.hparams;

    const layer_reuse_cb reuse = [&](int32_t il) {
        return source_of(il) == (uint32_t) il ? -1 : (int32_t) source_of(il);
    };

    for (uint32_t ig = 0; ig < groups.size(); ++ig) {
        auto & g = *groups[ig];

        const layer_filter_cb filter = [&](int32_t il) {
            return std::any_of(parts[il].begin(), parts[il].end(), [&](const part & p) { return p.ig == ig; });
        };

        const bool is_full = g.swa_type == LLAMA_SWA_TYPE_NONE || (g.native_swa && (params.swa_full || layerwise));

        g.kv = std::make_unique<llama_kv_cache>(
            /* model     */ model,
            /* hparams   */ g.hparams,
            /* type_k    */ type_k,
            /* type_v    */ type_v,
            /* v_trans   */ !cparams.flash_attn,
            /* offload   */ cparams.offload_kqv,
            /* unified   */ unified,
            /* kv_size   */ is_full ? sizing.n_ctx_seq : sizing.n_cells(g.window, g.n_sink),
            /* n_seq_max */ cparams.n_seq_max,
            /* n_pad     */ 1,
            /* n_swa     */ g.window == LLAMA_HWKV_FULL ? 0 : g.window,
            /* swa_type  */ g.swa_type,
            /* mem_other */ nullptr,
            /* filter    */ filter,
            /* reuse     */ hparams.n_layer_kv_from_start >= 0 ? reuse : nullptr,
            /* share     */ nullptr,
            /* name_tag  */ format("hwkv%u_", ig).c_str());

        g.kv->set_keep(g.n_sink, sizing.n_slack);
    }

    const llama_memory_recurrent::layer_filter_cb filter_recr = [&](int32_t il) {
        return llama_hwkv_layer_is_recurrent(model, il);
    };

    bool has_recr = false;

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        has_recr = has_recr || filter_recr(il);
    }

    if (has_recr) {
        mem_recr = std::make_unique<llama_memory_recurrent>(
            /* model     */ model,
            /* type_r    */ GGML_TYPE_F32,
            /* type_s    */ GGML_TYPE_F32,
            /* offload   */ cparams.offload_kqv,
            /* mem_size  */ std::max((uint32_t) 1, cparams.n_seq_max),
            /* n_seq_max */ cparams.n_seq_max,
            /* n_rs_seq  */ cparams.n_rs_seq,
            /* filter    */ filter_recr);
    }
}

//
// batches
//

llama_memory_context_ptr llama_memory_hwkv::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    enum split_type { SPLIT_SIMPLE, SPLIT_EQUAL, SPLIT_SEQ };

    const auto split = [&](split_type type) {
        // see [TAG_RECURRENT_ROLLBACK_SPLITS]
        const uint32_t n_keep_tail = mem_recr && mem_recr->n_rs_seq > 0 ? mem_recr->n_rs_seq + 1 : 0;

        std::vector<llama_ubatch> res;

        balloc.split_reset();

        while (true) {
            auto ubatch = type == SPLIT_SIMPLE ? balloc.split_simple(n_ubatch) :
                          type == SPLIT_SEQ    ? balloc.split_seq(n_ubatch) :
                                                 balloc.split_equal(n_ubatch, !unified, n_keep_tail);

            if (ubatch.n_tokens == 0) {
                break;
            }

            res.push_back(std::move(ubatch));  // NOLINT
        }

        // an incomplete split is no split
        if (balloc.get_n_used() < balloc.get_n_tokens()) {
            res.clear();
        }

        return res;
    };

    // the same order of attempts as llama_memory_hybrid with a recurrent memory, as llama_kv_cache_iswa without
    std::vector<split_type> types;

    if (mem_recr) {
        types.push_back(embd_all ? SPLIT_SEQ : SPLIT_EQUAL);
    } else {
        if (unified) {
            types.push_back(SPLIT_SIMPLE);
        }
        types.push_back(SPLIT_EQUAL);
    }

    for (const auto type : types) {
        auto ubatches = split(type);

        if (ubatches.empty()) {
            continue;
        }

        auto res = init_ubatches(std::move(ubatches));

        if (res) {
            return res;
        }
    }

    return std::make_unique<llama_memory_hwkv_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
}

llama_memory_context_ptr llama_memory_hwkv::init_ubatches(std::vector<llama_ubatch> ubatches) {
    if (mem_recr && !mem_recr->prepare(ubatches)) {
        LLAMA_LOG_ERROR("%s: failed to prepare recurrent ubatches\n", __func__);
        return nullptr;
    }

    std::vector<slots> slots_all;

    for (uint32_t ig = 0; ig < groups.size(); ++ig) {
        slots_all.push_back(prepare(ig, ubatches));

        if (slots_all.back().sinfos.empty()) {
            return nullptr;
        }
    }

    return std::make_unique<llama_memory_hwkv_context>(this, std::move(slots_all), std::move(ubatches));
}

// llama_kv_cache::prepare() tries the ubatches on the cells and then puts back what they overwrote, but not what
//   apply_ubatch() purged besides. for a ring this can lose cells that the first of several ubatches still sees.
//   so here the whole state of the cells is put back
llama_memory_hwkv::slots llama_memory_hwkv::prepare(uint32_t ig, const std::vector<llama_ubatch> & ubatches) {
    auto & kv = *groups[ig]->kv;

    if (groups[ig]->swa_type == LLAMA_SWA_TYPE_NONE) {
        return { kv.prepare(ubatches), false };
    }

    // the common case of decoding: nothing to try, the context looks for the slot and applies it
    if (ubatches.size() == 1) {
        auto sinfo = kv.find_slot(ubatches[0], false);

        if (!sinfo.empty()) {
            return { { std::move(sinfo) }, false };
        }
    }

    auto cells_old = kv.copy_cells();

    slots res = { {}, true };

    for (const auto & ubatch : ubatches) {
        trim_shared(ig);

        auto sinfo = kv.find_slot(ubatch, false);

        if (sinfo.empty()) {
            res.sinfos.clear();
            break;
        }

        kv.apply_ubatch(sinfo, ubatch);

        res.sinfos.push_back(std::move(sinfo));
    }

    kv.put_back_cells(std::move(cells_old));

    return res;
}

void llama_memory_hwkv::trim_shared(uint32_t ig) {
    auto & g  = *groups[ig];
    auto & kv = *g.kv;

    if (g.swa_type == LLAMA_SWA_TYPE_NONE || kv.get_n_seq_max() == 1 || kv.get_n_stream() > 1) {
        return;
    }

    const auto & cells = kv.get_cells(0);

    // the highest masked position that each sequence shares with another one
    std::vector<llama_pos> pos_rm(kv.get_n_seq_max(), -1);

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i) || cells.seq_count(i) == 1) {
            continue;
        }

        for (uint32_t s = 0; s < pos_rm.size(); ++s) {
            if (cells.seq_has(i, s) &&
                llama_hparams::is_masked_swa(
                    g.window, g.swa_type, g.n_sink, cells.pos_get(i),
                    std::max(cells.pos_get(i), cells.seq_pos_max(s) + 1 - (llama_pos) sizing.n_slack))) {
                pos_rm[s] = std::max(pos_rm[s], cells.pos_get(i));
            }
        }
    }

    // all positions in [pos_min, pos_max] stay present, so what lies below goes with them, but for the sink tokens
    for (uint32_t s = 0; s < pos_rm.size(); ++s) {
        if (pos_rm[s] >= 0) {
            kv.seq_rm(s, g.n_sink, pos_rm[s] + 1);
        }
    }
}

llama_memory_context_ptr llama_memory_hwkv::init_full() {
    return std::make_unique<llama_memory_hwkv_context>(this);
}

llama_memory_context_ptr llama_memory_hwkv::init_update(llama_context * lctx, bool optimize) {
    return std::make_unique<llama_memory_hwkv_context>(this, lctx, optimize);
}

//
// sequences
//

bool llama_memory_hwkv::get_can_shift() const {
    // a shift brings tokens into a window that it no longer holds (see llama_kv_cache_iswa)
    return std::all_of(groups.begin(), groups.end(), [&](const auto & g) {
        return g->kv->get_can_shift() && g->kv->get_size() == groups[0]->kv->get_size() &&
               (g->native_swa || g->window == LLAMA_HWKV_FULL);
    });
}

void llama_memory_hwkv::clear(bool data) {
    for (auto & g : groups) {
        g->kv->clear(data);
    }
    if (mem_recr) {
        mem_recr->clear(data);
    }
}

bool llama_memory_hwkv::can_resume(llama_seq_id seq_id, llama_pos p0) const {
    return std::all_of(groups.begin(), groups.end(), [&](const auto & g) {
        return g->swa_type == LLAMA_SWA_TYPE_NONE || g->seq_pos_min(seq_id) <= g->needed(p0);
    });
}

bool llama_memory_hwkv::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    p0 = std::max(p0, 0);

    if (p1 < 0) {
        p1 = std::numeric_limits<llama_pos>::max();
    }

    const llama_seq_id s0 = seq_id < 0 ? 0 : seq_id;
    const llama_seq_id s1 = seq_id < 0 ? groups[0]->kv->get_n_seq_max() : seq_id + 1;

    // only a cut is checked: the sequence is going to be continued at p0
    for (llama_seq_id s = s0; s < s1; ++s) {
        llama_pos pos_max = -1;

        for (const auto & g : groups) {
            pos_max = std::max(pos_max, g->kv->seq_pos_max(s));
        }

        if (p0 > 0 && p0 <= pos_max && p1 > pos_max && !can_resume(s, p0)) {
            LLAMA_LOG_DEBUG("%s: seq %d: cannot be cut back to %d positions, the windows hold too little\n", __func__,
                            s, p0);
            return false;
        }
    }

    // may refuse as well, and does not change anything then
    if (mem_recr && !mem_recr->seq_rm(seq_id, p0, p1)) {
        return false;
    }

    for (auto & g : groups) {
        g->kv->seq_rm(seq_id, p0, p1);
    }

    return true;
}

llama_pos llama_memory_hwkv::seq_pos_first(llama_seq_id seq_id) const {
    llama_pos res = groups[0]->kv->seq_pos_min(seq_id);

    for (const auto & g : groups) {
        res = std::min(res, g->kv->seq_pos_min(seq_id));
    }

    return res;
}

void llama_memory_hwkv::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (seq_id_src == seq_id_dst) {
        return;
    }

    p0 = std::max(p0, 0);

    if (p1 < 0) {
        p1 = std::numeric_limits<llama_pos>::max();
    }

    const llama_pos pos_max = seq_pos_max(seq_id_src);

    const bool is_all = p0 <= std::max(0, seq_pos_first(seq_id_src)) && p1 > pos_max;

    // a part that the copy could not be continued from is not copied: better no history than one with holes, or with the
    //   recurrent state of a later position
    if ((!is_all && !unified) || (p1 <= pos_max && (mem_recr || !can_resume(seq_id_src, p1)))) {
        LLAMA_LOG_ERROR(
            "%s: positions [%d, %d) of sequence %d cannot be copied to sequence %d, what is kept does not go back that "
            "far; sequence %d is now empty\n",
            __func__, p0, p1, seq_id_src, seq_id_dst, seq_id_dst);

        seq_rm(seq_id_dst, -1, -1);
        return;
    }

    for (auto & g : groups) {
        // note: the cross-stream copy of llama_kv_cache takes ranges relative to its own size
        g->kv->seq_cp(seq_id_src, seq_id_dst, is_all ? -1 : p0, is_all ? -1 : p1);
    }
    if (mem_recr) {
        mem_recr->seq_cp(seq_id_src, seq_id_dst, p0, p1);
    }
}

void llama_memory_hwkv::seq_keep(llama_seq_id seq_id) {
    for (auto & g : groups) {
        g->kv->seq_keep(seq_id);
    }
    if (mem_recr) {
        mem_recr->seq_keep(seq_id);
    }
}

void llama_memory_hwkv::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (!get_can_shift()) {
        LLAMA_LOG_ERROR("%s: positions cannot be shifted under an hwkv policy, sequence %d is left as it is\n",
                        __func__, seq_id);
        return;
    }

    for (auto & g : groups) {
        g->kv->seq_add(seq_id, p0, p1, shift);
    }
    if (mem_recr) {
        mem_recr->seq_add(seq_id, p0, p1, shift);
    }
}

void llama_memory_hwkv::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    if (!get_can_shift()) {
        LLAMA_LOG_ERROR("%s: positions cannot be divided under an hwkv policy, sequence %d is left as it is\n",
                        __func__, seq_id);
        return;
    }

    for (auto & g : groups) {
        g->kv->seq_div(seq_id, p0, p1, d);
    }
    if (mem_recr) {
        mem_recr->seq_div(seq_id, p0, p1, d);
    }
}

llama_pos llama_memory_hwkv::seq_pos_min(llama_seq_id seq_id) const {
    if (seq_pos_max(seq_id) < 0) {
        return -1;
    }

    llama_pos res = std::max(0, seq_pos_first(seq_id));

    for (const auto & g : groups) {
        const llama_pos pos_min = g->seq_pos_min(seq_id);

        if (pos_min > 0) {
            res = std::max(res, g->resumable(pos_min) - 1);
        }
    }

    // the recurrent state is that of its last position and cannot be cut back
    if (mem_recr) {
        res = std::max(res, mem_recr->seq_pos_min(seq_id));
    }

    return res;
}

llama_pos llama_memory_hwkv::seq_pos_max(llama_seq_id seq_id) const {
    // after a partial restore the full group is ahead of the others until it is cut back
    llama_pos res = groups[0]->kv->seq_pos_max(seq_id);

    for (const auto & g : groups) {
        res = std::min(res, g->kv->seq_pos_max(seq_id));
    }
    if (mem_recr) {
        res = std::min(res, mem_recr->seq_pos_max(seq_id));
    }

    return res;
}

//
// memory
//

std::map<ggml_backend_buffer_type_t, size_t> llama_memory_hwkv::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> res;

    const auto add = [&](const llama_memory_i & mem) {
        for (const auto & [buft, size] : mem.memory_breakdown()) {
            res[buft] += size;
        }
    };

    for (const auto & g : groups) {
        add(*g->kv);
    }
    if (mem_recr) {
        add(*mem_recr);
    }

    return res;
}

uint32_t llama_memory_hwkv::n_head_kv(uint32_t ig) const {
    uint32_t res = 0;

    for (const uint32_t il : groups[ig]->kv->get_layer_ids()) {
        res += groups[ig]->hparams.n_head_kv(il);
    }

    return res;
}

size_t llama_memory_hwkv::row_size(uint32_t il, uint32_t n_head_kv) const {
    return ggml_row_size(type_k, model.hparams.n_embd_head_k(il) * n_head_kv) +
           ggml_row_size(type_v, model.hparams.n_embd_head_v(il) * n_head_kv);
}

const llama_hwkv_sizing & llama_memory_hwkv::get_sizing() const {
    return sizing;
}

llama_hwkv_footprint llama_memory_hwkv::footprint() const {
    const auto & hparams = model.hparams;

    llama_hwkv_footprint res = {};

    res.source      = policy->source;
    res.fingerprint = policy->fingerprint(hparams.n_layer_all);
    res.n_sink      = policy->n_sink;

    for (uint32_t ig = 0; ig < groups.size(); ++ig) {
        const auto & g  = *groups[ig];
        const auto & kv = *g.kv;

        llama_hwkv_footprint::group group = {};

        group.window     = g.window;
        group.native_swa = g.native_swa;
        group.n_cells    = kv.get_size();
        group.n_stream   = kv.get_n_stream();
        group.n_head_kv  = n_head_kv(ig);

        for (const uint32_t il : kv.get_layer_ids()) {
            const size_t bytes = ggml_nbytes(kv.get_k_storage(il)) + ggml_nbytes(kv.get_v_storage(il));

            group.bytes += bytes;
            group.layers.push_back({ il, g.hparams.n_head_kv(il), bytes });

            if (g.swa_type != LLAMA_SWA_TYPE_NONE) {
                res.checkpoint_bytes += std::min<size_t>((size_t) g.window + g.n_sink, kv.get_size()) *
                                        row_size(il, g.hparams.n_head_kv(il));
            }
        }

        res.kv_bytes += g.native_swa ? 0 : group.bytes;

        res.groups.push_back(std::move(group));
    }

    const size_t n_cells = (size_t) groups[0]->kv->get_n_stream() * sizing.n_ctx_seq;

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (llama_hwkv_layer_kind_of(model, il) == LLAMA_HWKV_LAYER_ATTENTION) {
            res.full_kv_bytes += n_cells * row_size(il, hparams.n_head_kv(il));
        }
    }

    if (mem_recr) {
        for (const auto & [_, size] : mem_recr->memory_breakdown()) {
            res.checkpoint_bytes += size / mem_recr->size;
        }
    }

    return res;
}

//
// graph
//

uint32_t llama_memory_hwkv::n_groups() const {
    return groups.size();
}

llama_kv_cache * llama_memory_hwkv::get_kv(uint32_t ig) const {
    return groups[ig]->kv.get();
}

llama_memory_recurrent * llama_memory_hwkv::get_recr() const {
    return mem_recr.get();
}

bool llama_memory_hwkv::is_native_swa(uint32_t ig) const {
    return groups[ig]->native_swa;
}

llama_hwkv_layerwise * llama_memory_hwkv::get_layerwise() const {
    return layerwise.get();
}

void llama_memory_hwkv::set_input_kq_mask(uint32_t             ig,
                                          ggml_tensor *        dst,
                                          const llama_ubatch * ubatch,
                                          bool                 causal) const {
    const auto & kv = *groups[ig]->kv;

    const auto window = layerwise && !groups[ig]->native_swa ? layerwise->window(ig) : LLAMA_HWKV_FULL;

    if (window == LLAMA_HWKV_FULL) {
        kv.set_input_kq_mask(dst, ubatch, causal);
    } else {
        kv.set_input_kq_mask(dst, ubatch, causal, window, LLAMA_SWA_TYPE_STANDARD, layerwise->n_sink());
    }
}

const std::vector<llama_memory_hwkv::part> & llama_memory_hwkv::get_parts(uint32_t il) const {
    return parts.at(il);
}

uint32_t llama_memory_hwkv::n_graph_nodes() const {
    uint32_t res = 64;

    for (const auto & layer : parts) {
        for (const auto & p : layer) {
            res += 32 + 12 * p.runs.size();
        }
    }

    return res;
}

//
// llama_memory_hwkv_context
//

llama_memory_hwkv_context::llama_memory_hwkv_context(llama_memory_status status) : status(status) {}

llama_memory_hwkv_context::llama_memory_hwkv_context(llama_memory_hwkv * mem) : mem(mem) {
    for (uint32_t ig = 0; ig < mem->n_groups(); ++ig) {
        ctxs_kv.push_back(mem->get_kv(ig)->init_full());
    }
    if (mem->get_recr()) {
        ctx_recr = mem->get_recr()->init_full();
    }

    init_status();
}

llama_memory_hwkv_context::llama_memory_hwkv_context(llama_memory_hwkv * mem, llama_context * lctx, bool optimize) :
    mem(mem) {
    for (uint32_t ig = 0; ig < mem->n_groups(); ++ig) {
        ctxs_kv.push_back(mem->get_kv(ig)->init_update(lctx, optimize));
    }
    if (mem->get_recr()) {
        ctx_recr = mem->get_recr()->init_update(lctx, optimize);
    }

    init_status();
}

llama_memory_hwkv_context::llama_memory_hwkv_context(llama_memory_hwkv *                   mem,
                                                     std::vector<llama_memory_hwkv::slots> slots,
                                                     std::vector<llama_ubatch>             ubatches_in) :
    mem(mem),
    ubatches(std::move(ubatches_in)) {
    for (uint32_t ig = 0; ig < mem->n_groups(); ++ig) {
        trimmed.push_back(slots[ig].trimmed);

        ctxs_kv.push_back(
            std::make_unique<llama_kv_cache_context>(mem->get_kv(ig), std::move(slots[ig].sinfos), ubatches));
    }
    if (mem->get_recr()) {
        ctx_recr = std::make_unique<llama_memory_recurrent_context>(mem->get_recr(), ubatches);
    }

    init_status();
}

void llama_memory_hwkv_context::init_status() {
    status = LLAMA_MEMORY_STATUS_NO_UPDATE;

    for (const auto & ctx : ctxs_kv) {
        status = llama_memory_status_combine(status, ctx->get_status());
    }
    if (ctx_recr) {
        status = llama_memory_status_combine(status, ctx_recr->get_status());
    }
}

bool llama_memory_hwkv_context::next() {
    assert(status == LLAMA_MEMORY_STATUS_SUCCESS);

    for (auto & ctx : ctxs_kv) {
        ctx->next();
    }
    if (ctx_recr) {
        ctx_recr->next();
    }

    return ++i_next < ubatches.size();
}

bool llama_memory_hwkv_context::apply() {
    assert(!llama_memory_status_is_fail(status));

    bool res = true;

    for (uint32_t ig = 0; ig < ctxs_kv.size(); ++ig) {
        if (!trimmed.empty() && trimmed[ig]) {
            mem->trim_shared(ig);
        }

        res = res & ctxs_kv[ig]->apply();
    }
    if (ctx_recr) {
        res = res & ctx_recr->apply();
    }

    return res;
}

llama_memory_status llama_memory_hwkv_context::get_status() const {
    return status;
}

const llama_ubatch & llama_memory_hwkv_context::get_ubatch() const {
    assert(status == LLAMA_MEMORY_STATUS_SUCCESS);

    return ubatches[i_next];
}

const llama_memory_hwkv & llama_memory_hwkv_context::get_mem() const {
    return *mem;
}

const llama_kv_cache_context * llama_memory_hwkv_context::get_kv(uint32_t ig) const {
    return static_cast<const llama_kv_cache_context *>(ctxs_kv[ig].get());
}

const llama_memory_recurrent_context * llama_memory_hwkv_context::get_recr() const {
    return static_cast<const llama_memory_recurrent_context *>(ctx_recr.get());
}

llama_hwkv_layerwise * llama_hwkv_layerwise_of(const llama_memory_i * memory) {
    const auto * mem = dynamic_cast<const llama_memory_hwkv *>(memory);

    return mem ? mem->get_layerwise() : nullptr;
}

//
// llama_memory_hwkv_create
//

llama_memory_i * llama_memory_hwkv_create(const llama_model &         model,
                                          const llama_memory_params & params,
                                          const llama_cparams &       cparams) {
    // the draft head of the model itself: a small cache of its own
    if (params.ctx_type == LLAMA_CONTEXT_TYPE_MTP) {
        return nullptr;
    }

    // this draft model shares the cells of its target and expects upstream's cache there
    if (model.arch == LLM_ARCH_GEMMA4_ASSISTANT && dynamic_cast<llama_memory_hwkv *>(params.mem_other)) {
        throw std::runtime_error(
            "hwkv: a gemma4-assistant draft reads the target's KV cache, which is not possible under a policy; use "
            "--hwkv-policy off");
    }

    auto policy = llama_hwkv_policy_of(model);

    if (!policy) {
        return nullptr;
    }

    const llama_hwkv_sizing sizing(cparams);

    bool is_full = true;

    for (const auto & [_, row] : policy->rows) {
        for (const int32_t w : row) {
            is_full = is_full && sizing.is_full(w, policy->n_sink);
        }
    }

    if (is_full && !policy->calibrate) {
        LLAMA_LOG_INFO(
            "%s: every window of the hwkv policy covers the context (%u positions), the usual KV cache is used\n",
            __func__, cparams.n_ctx_seq);
        return nullptr;
    }

    const auto refuse = [&](const std::string & why) {
        throw std::runtime_error(policy->calibrate ?
                                     "hwkv: the model cannot be calibrated: " + why :
                                     "hwkv: the policy cannot be served: " + why + "; use --hwkv-policy off");
    };

    const std::string why = llama_hwkv_refusal(model);

    if (!why.empty()) {
        refuse(model.arch_name() + ": " + why);
    }
    if (policy->calibrate && !cparams.flash_attn) {
        refuse("calibration needs FlashAttention");
    }
    if (!cparams.causal_attn) {
        refuse("a context with non-causal attention has no windows of past tokens");
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        refuse("split mode \"tensor\" divides the KV heads of a layer by itself");
    }

    return new llama_memory_hwkv(model, params, cparams, std::move(policy));
}
