#include "llama-graph-hwkv.h"

#include "llama-impl.h"

#include <algorithm>

//
// llm_graph_hwkv
//

llm_graph_hwkv::llm_graph_hwkv(ggml_context *                    ctx0,
                               const llama_ubatch &              ubatch,
                               const llama_hparams &             hparams,
                               const llama_cparams &             cparams,
                               const llama_memory_hwkv_context * mctx) :
    hparams(hparams),
    cparams(cparams),
    mctx(mctx) {
    const auto & mem = mctx->get_mem();

    if (auto * lw = mem.get_layerwise()) {
        lw->graph_begin();
    }

    for (uint32_t ig = 0; ig < mem.n_groups(); ++ig) {
        const auto * kv = mctx->get_kv(ig);

        group g;

        g.k_idxs  = kv->build_input_k_idxs(ctx0, ubatch);
        g.v_idxs  = kv->build_input_v_idxs(ctx0, ubatch);
        g.kq_mask = build_attn_inp_kq_mask(ctx0, kv, ubatch, cparams);

        if (ig == 0 || mem.is_native_swa(ig)) {
            g.k_rot = kv->build_input_k_rot(ctx0);
            g.v_rot = kv->build_input_v_rot(ctx0);
        }

        groups.push_back(g);
    }
}

void llm_graph_hwkv::set_input(const llama_ubatch * ubatch) {
    for (uint32_t ig = 0; ig < groups.size(); ++ig) {
        const auto & g  = groups[ig];
        const auto * kv = mctx->get_kv(ig);

        // see llama_non_causal_type: for llama_kv_cache a cache with a window is the model's own sliding window,
        //   but ours stands for a global layer, which stays causal
        const bool causal = cparams.causal_attn || (hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY &&
                                                    !mctx->get_mem().is_native_swa(ig));

        // inputs that the graph does not use are not allocated
        if (g.k_idxs->buffer) {
            kv->set_input_k_idxs(g.k_idxs, ubatch);
        }
        if (g.v_idxs->buffer) {
            kv->set_input_v_idxs(g.v_idxs, ubatch);
        }
        if (g.kq_mask->buffer) {
            mctx->get_mem().set_input_kq_mask(ig, g.kq_mask, ubatch, causal);
        }
        if (g.k_rot && g.k_rot->buffer) {
            kv->set_input_k_rot(g.k_rot);
        }
        if (g.v_rot && g.v_rot->buffer) {
            kv->set_input_v_rot(g.v_rot);
        }
    }
}

bool llm_graph_hwkv::can_reuse(const llm_graph_params & params, const llama_memory_hwkv_context * mctx_new) {
    mctx = mctx_new;

    if (mctx->get_mem().get_layerwise()) {
        return false;
    }

    for (uint32_t ig = 0; ig < groups.size(); ++ig) {
        if (groups[ig].k_idxs->ne[0] != params.ubatch.n_tokens ||
            !can_reuse_kq_mask(groups[ig].kq_mask, mctx->get_kv(ig), params.ubatch, params.cparams)) {
            return false;
        }
    }

    return true;
}

const llm_graph_hwkv::group & llm_graph_hwkv::rot_of(uint32_t il) const {
    const auto & mem = mctx->get_mem();

    const uint32_t ig = mem.get_parts(il).front().ig;

    return groups[mem.is_native_swa(ig) ? ig : 0];
}

// the heads of a part side by side: t [n_embd_head, n_head, n_tokens], n_rep heads for each KV head
static ggml_tensor * hwkv_gather(ggml_context *                  ctx0,
                                 ggml_tensor *                   t,
                                 const llama_memory_hwkv::part & p,
                                 int64_t                         n_rep) {
    if (p.n_head_kv * n_rep == t->ne[1]) {
        return t;
    }

    ggml_tensor * res = nullptr;

    for (const auto & r : p.runs) {
        ggml_tensor * cur =
            ggml_view_3d(ctx0, t, t->ne[0], r.n * n_rep, t->ne[2], t->nb[1], t->nb[2], r.first * n_rep * t->nb[1]);

        res = res ? ggml_concat(ctx0, res, cur, 1) : cur;
    }

    return res;
}

// the same for a tensor of one value per query head
static ggml_tensor * hwkv_gather_1d(ggml_context *                  ctx0,
                                    ggml_tensor *                   t,
                                    const llama_memory_hwkv::part & p,
                                    int64_t                         n_rep) {
    if (p.n_head_kv * n_rep == t->ne[0]) {
        return t;
    }

    ggml_tensor * res = nullptr;

    for (const auto & r : p.runs) {
        ggml_tensor * cur = ggml_view_1d(ctx0, t, r.n * n_rep, r.first * n_rep * t->nb[0]);

        res = res ? ggml_concat(ctx0, res, cur, 0) : cur;
    }

    return res;
}

ggml_tensor * llm_graph_hwkv::build_attn(const llm_graph_context & g,
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
                                         int                       il) const {
    GGML_ASSERT(kq_b == nullptr && v_mla == nullptr && !cparams.training);

    ggml_context * ctx0 = g.ctx0;

    const auto & parts = mctx->get_mem().get_parts(il);

    GGML_ASSERT(!parts.empty());

    auto * k_rot = rot_of(il).k_rot;
    auto * v_rot = rot_of(il).v_rot;

    if (k_rot) {
        q_cur = llama_mul_mat_hadamard(ctx0, q_cur, k_rot);
        k_cur = k_cur ? llama_mul_mat_hadamard(ctx0, k_cur, k_rot) : nullptr;
    }
    if (v_rot) {
        v_cur = v_cur ? llama_mul_mat_hadamard(ctx0, v_cur, v_rot) : nullptr;
    }

    // the order of llm_graph_context::build_attn()
    for (ggml_tensor * t : { q_cur, v_cur, k_cur }) {
        if (t) {
            ggml_build_forward_expand(g.gf, t);
        }
    }

    int64_t n_head_kv = 0;

    for (const auto & p : parts) {
        n_head_kv += p.n_head_kv;
    }

    GGML_ASSERT(q_cur->ne[1] % n_head_kv == 0);

    const int64_t n_gqa = q_cur->ne[1] / n_head_kv;

    // store all before attending: fewer graph splits
    for (const auto & p : parts) {
        const auto * kv = mctx->get_kv(p.ig);

        if (k_cur) {
            ggml_build_forward_expand(g.gf, kv->cpy_k(ctx0, hwkv_gather(ctx0, k_cur, p, 1), groups[p.ig].k_idxs, il));
        }
        if (v_cur) {
            ggml_build_forward_expand(g.gf, kv->cpy_v(ctx0, hwkv_gather(ctx0, v_cur, p, 1), groups[p.ig].v_idxs, il));
        }
    }

    // K and V of a layer that is windowed by a policy: not the model's own windows, nor a layer that attends another one's
    auto * lw = k_cur && !mctx->get_mem().is_native_swa(parts[0].ig) ? mctx->get_mem().get_layerwise() : nullptr;

    if (lw) {
        lw->on_stored(il, ggml_graph_n_nodes(g.gf), q_cur, sinks, kq_scale);
    }

    // the outputs of each run of KV heads, [n_embd_head_v*n_gqa*run.n, n_tokens]
    std::vector<std::pair<uint32_t, ggml_tensor *>> outs;

    for (const auto & p : parts) {
        const auto * kv = mctx->get_kv(p.ig);

        ggml_tensor * q = hwkv_gather(ctx0, q_cur, p, n_gqa);
        ggml_tensor * k = kv->get_k(ctx0, il);
        ggml_tensor * v = kv->get_v(ctx0, il);

        ggml_tensor * sinks_p = sinks ? hwkv_gather_1d(ctx0, sinks, p, n_gqa) : nullptr;

        ggml_tensor * cur = g.build_attn_mha(q, k, v, nullptr, groups[p.ig].kq_mask, sinks_p, nullptr, 0, kq_scale, il);

        const int64_t n_embd_kv = cur->ne[0] / p.n_head_kv;

        int64_t i0 = 0;

        for (const auto & r : p.runs) {
            outs.emplace_back(r.first, p.runs.size() == 1 ? cur :
                                                            ggml_view_2d(ctx0, cur, r.n * n_embd_kv, cur->ne[1],
                                                                         cur->nb[1], i0 * n_embd_kv * cur->nb[0]));

            i0 += r.n;
        }
    }

    // back into the order of the heads. neighbours first, so that every value is copied about log2(outs.size()) times
    std::sort(outs.begin(), outs.end(), [](const auto & a, const auto & b) { return a.first < b.first; });

    while (outs.size() > 1) {
        for (size_t i = 0; 2 * i < outs.size(); ++i) {
            const auto & a = outs[2 * i];

            outs[i] = 2 * i + 1 == outs.size() ?
                          a :
                          std::make_pair(a.first, ggml_concat(ctx0, a.second, outs[2 * i + 1].second, 0));
        }

        outs.resize((outs.size() + 1) / 2);
    }

    ggml_tensor * cur = outs[0].second;

    g.cb(cur, "kqv_out", il);

    if (lw) {
        lw->on_attended(il, cur);
    }

    if (v_rot) {
        cur = llama_mul_mat_hadamard(ctx0, cur, v_rot);
    }

    if (wo) {
        // see llm_graph_context::build_attn()
        if (g.arch == LLM_ARCH_GLM4 || g.arch == LLM_ARCH_GLM4_MOE || g.arch == LLM_ARCH_JAIS2) {
            cur = g.build_lora_mm(wo, cur);
            ggml_prec_set_acc(cur, GGML_PREC_F32);
            if (wo_s) {
                cur = ggml_mul(ctx0, cur, wo_s);
            }
        } else {
            cur = g.build_lora_mm(wo, cur, wo_s);
        }
    }

    if (wo_b) {
        cur = ggml_add(ctx0, cur, wo_b);
    }

    return cur;
}

//
// inputs
//

// base: the input class of the memory that llama_memory_hwkv stands in for
template <typename base> class llm_graph_input_hwkv_attn : public base {
  public:
    llm_graph_input_hwkv_attn(const llm_graph_context & g, const llama_memory_hwkv_context * mctx) :
        base(g.hparams, g.cparams, nullptr),
        impl(g.ctx0, g.ubatch, g.hparams, g.cparams, mctx) {
        base::hwkv = &impl;
    }

    void set_input(const llama_ubatch * ubatch) override { impl.set_input(ubatch); }

    bool can_reuse(const llm_graph_params & params) override {
        return impl.can_reuse(params, static_cast<const llama_memory_hwkv_context *>(params.mctx));
    }

  private:
    llm_graph_hwkv impl;
};

template <typename base, typename base_attn> class llm_graph_input_hwkv_hybrid : public base {
  public:
    llm_graph_input_hwkv_hybrid(const llm_graph_context & g, const llama_memory_hwkv_context * mctx) :
        base(g.cparams,
             std::make_unique<llm_graph_input_hwkv_attn<base_attn>>(g, mctx),
             build_rs_inp_impl(g.ctx0, g.ubatch, mctx->get_recr()),
             nullptr) {}

    void set_input(const llama_ubatch * ubatch) override {
        base::inp_attn->set_input(ubatch);
        base::inp_rs->set_input(ubatch);
    }

    bool can_reuse(const llm_graph_params & params) override {
        const auto * recr = static_cast<const llama_memory_hwkv_context *>(params.mctx)->get_recr();

        auto & rs = *base::inp_rs;

        rs.mctx = recr;

        bool res = base::inp_attn->can_reuse(params);

        // the checks of llm_graph_input_mem_hybrid::can_reuse()
        res &= rs.s_copy->ne[0] == recr->get_n_rs();
        res &= rs.s_copy_main->ne[0] == params.ubatch.n_seqs;
        res &= rs.s_copy_extra->ne[0] == recr->get_n_rs() - params.ubatch.n_seqs;

        res &= rs.head == recr->get_head();
        res &= rs.rs_z == recr->get_rs_z();

        return res;
    }
};

template <typename input, typename base> static std::unique_ptr<base> hwkv_make_input(const llm_graph_context & g) {
    const auto * mctx = dynamic_cast<const llama_memory_hwkv_context *>(g.mctx);

    return mctx ? std::make_unique<input>(g, mctx) : nullptr;
}

std::unique_ptr<llm_graph_input_attn_kv> llm_graph_hwkv_inp_attn_kv(const llm_graph_context & g) {
    return hwkv_make_input<llm_graph_input_hwkv_attn<llm_graph_input_attn_kv>, llm_graph_input_attn_kv>(g);
}

std::unique_ptr<llm_graph_input_attn_kv_iswa> llm_graph_hwkv_inp_attn_kv_iswa(const llm_graph_context & g) {
    return hwkv_make_input<llm_graph_input_hwkv_attn<llm_graph_input_attn_kv_iswa>, llm_graph_input_attn_kv_iswa>(g);
}

std::unique_ptr<llm_graph_input_mem_hybrid> llm_graph_hwkv_inp_mem_hybrid(const llm_graph_context & g) {
    return hwkv_make_input<llm_graph_input_hwkv_hybrid<llm_graph_input_mem_hybrid, llm_graph_input_attn_kv>,
                           llm_graph_input_mem_hybrid>(g);
}

std::unique_ptr<llm_graph_input_mem_hybrid_iswa> llm_graph_hwkv_inp_mem_hybrid_iswa(const llm_graph_context & g) {
    return hwkv_make_input<llm_graph_input_hwkv_hybrid<llm_graph_input_mem_hybrid_iswa, llm_graph_input_attn_kv_iswa>,
                           llm_graph_input_mem_hybrid_iswa>(g);
}
