#include "llama-hwkv-layerwise.h"

#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-hwkv-policy.h"
#include "llama-impl.h"

#include <stdexcept>
#include <unordered_map>

//
// by whoever calibrates
//

void llama_hwkv_layerwise::set_windows(uint32_t il, uint32_t n_sink, std::vector<int32_t> windows) {
    rows[il] = { n_sink, std::move(windows) };
}

void llama_hwkv_layerwise::set_samples(std::vector<std::pair<llama_seq_id, llama_pos>> samples_new) {
    samples.clear();

    n_samples = samples_new.size();

    for (size_t i = 0; i < n_samples; ++i) {
        samples[samples_new[i]].push_back(i);
    }
}

void llama_hwkv_layerwise::begin(int32_t il_from_new, int32_t il_to_new) {
    if (il_from_new != NONE && state.empty()) {
        throw std::runtime_error(format("nothing is kept at layer %d", il_from_new));
    }

    il_from = il_from_new;
    il_to   = il_to_new;
    active  = true;
    iu      = 0;

    if (il_from == NONE) {
        state.clear();
    }

    needed.clear();

    result = {};
}

void llama_hwkv_layerwise::end() {
    for (auto it = state.begin(); it != state.end();) {
        it = needed.count(it->first) > 0 ? std::next(it) : state.erase(it);
    }

    active = false;
}

int32_t llama_hwkv_layerwise::save() {
    saved[id_next] = state;

    return id_next++;
}

bool llama_hwkv_layerwise::restore(int32_t id) {
    const auto it = saved.find(id);

    if (it == saved.end()) {
        return false;
    }

    state = it->second;

    return true;
}

void llama_hwkv_layerwise::drop(int32_t id) {
    saved.erase(id);
}

const llama_hwkv_layerwise::attention & llama_hwkv_layerwise::get() const {
    return result;
}

//
// by the graph
//

void llama_hwkv_layerwise::graph_begin() {
    cuts.clear();
}

void llama_hwkv_layerwise::on_stored(uint32_t il, int i_node, ggml_tensor * q, ggml_tensor * sinks, float scale) {
    cut c;

    c.i_node = i_node;
    c.q      = q;
    c.sinks  = sinks;
    c.scale  = scale;

    cuts[il] = c;
}

void llama_hwkv_layerwise::on_attended(uint32_t il, ggml_tensor * out) {
    cuts.at(il).out = out;
}

//
// by the memory
//

int32_t llama_hwkv_layerwise::window(uint32_t ih) const {
    const auto it = active && il_from != NONE ? rows.find(il_from) : rows.end();

    return it == rows.end() || ih >= it->second.windows.size() ? LLAMA_HWKV_FULL : it->second.windows[ih];
}

uint32_t llama_hwkv_layerwise::n_sink() const {
    const auto it = active && il_from != NONE ? rows.find(il_from) : rows.end();

    return it == rows.end() ? 0 : it->second.n_sink;
}

//
// by the context
//

const llama_hwkv_layerwise::cut * llama_hwkv_layerwise::cut_of(int32_t il) const {
    return il == NONE ? nullptr : &cuts.at(il);
}

llama_hwkv_layerwise::key llama_hwkv_layerwise::key_of(int i_node, const ggml_tensor * t) const {
    return { iu, i_node, t->name };
}

static ggml_tensor * layerwise_root(ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

ggml_cgraph * llama_hwkv_layerwise::slice(ggml_cgraph * gf) {
    // the cut tensors of the last graph are gone
    live_in.clear();
    live_out.clear();

    if (!active) {
        return gf;
    }

    const int n_nodes = ggml_graph_n_nodes(gf);
    const int i0      = il_from == NONE ? 0 : cut_of(il_from)->i_node;
    const int i1      = il_to == NONE ? n_nodes : cut_of(il_to)->i_node;

    std::unordered_map<const ggml_tensor *, int> index;

    for (int i = 0; i < n_nodes; ++i) {
        index[ggml_graph_node(gf, i)] = i;
    }

    // what is computed before i0 or i1 and read behind it; leafs and caches are not computed
    std::map<int, ggml_tensor *> live0;
    std::map<int, ggml_tensor *> live1;

    std::set<ggml_tensor *> inputs;

    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);

        for (ggml_tensor * src : node->src) {
            if (!src) {
                continue;
            }

            ggml_tensor * root = layerwise_root(src);

            if (root->op == GGML_OP_NONE && (root->flags & GGML_TENSOR_FLAG_INPUT)) {
                inputs.insert(root);
            }

            const auto it = index.find(root);

            // a branch that is not taken is in the graph all the same
            if (it == index.end() || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }

            if (it->second < i0 && i >= i0) {
                live0[it->second] = root;
            }
            if (it->second < i1 && i >= i1) {
                live1[it->second] = root;
            }
        }
    }

    // what was computed by an earlier run is an input now
    for (int i = 0; i < i0; ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);

        std::fill(std::begin(node->src), std::end(node->src), nullptr);

        if (node->view_src) {
            node->op     = GGML_OP_VIEW;
            node->src[0] = node->view_src;
        } else {
            node->op = GGML_OP_NONE;
            ggml_set_input(node);
        }
    }

    for (const auto & [i, t] : live0) {
        live_in.emplace_back(i, t);
    }
    for (const auto & [i, t] : live1) {
        needed.insert(key_of(i, t));

        if (i >= i0) {
            ggml_set_output(t);
            live_out.emplace_back(i, t);
        }
    }

    if (const auto * c = cut_of(il_from)) {
        ggml_set_output(layerwise_root(c->out));
    }

    const size_t n_size = ggml_graph_size(gf);

    ctx.reset(ggml_init({ ggml_graph_overhead_custom(n_size, false), nullptr, true }));

    ggml_cgraph * res = ggml_new_graph_custom(ctx.get(), n_size, false);

    // also those that only the other nodes read: the context sets them all
    for (ggml_tensor * t : inputs) {
        ggml_build_forward_expand(res, t);
    }
    for (int i = i0; i < i1; ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);

        if (node->flags & GGML_TENSOR_FLAG_COMPUTE) {
            ggml_build_forward_expand(res, node);
        }
    }

    return res;
}

void llama_hwkv_layerwise::load() {
    for (const auto & [i, t] : live_in) {
        // not allocated: only a later run reads it
        if (!t->buffer) {
            continue;
        }

        const auto it = state.find(key_of(i, t));

        if (it == state.end() || it->second->size() != ggml_nbytes(t)) {
            throw std::runtime_error(format("what layer %d needs was not kept (%s)", il_from, t->name));
        }

        ggml_backend_tensor_set(t, it->second->data(), 0, ggml_nbytes(t));
    }
}

// dim: the dimension of t that counts tokens; what lies below it is a row
void llama_hwkv_layerwise::capture(const llama_ubatch & ubatch,
                                   const ggml_tensor *  t,
                                   int                  dim,
                                   std::vector<float> & dst) const {
    GGML_ASSERT(t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[dim] == ubatch.n_tokens);

    // the heads of a row may have gaps in between
    const size_t n_head = dim == 2 ? t->ne[1] : 1;
    const size_t n_embd = t->ne[0];

    dst.resize(n_embd * n_head * n_samples);

    for (uint32_t it = 0; it < ubatch.n_tokens; ++it) {
        const auto sample = samples.find({ ubatch.seq_id[it][0], ubatch.pos[it] });

        if (sample == samples.end()) {
            continue;
        }

        for (const size_t is : sample->second) {
            for (size_t ih = 0; ih < n_head; ++ih) {
                ggml_backend_tensor_get(t, dst.data() + (is * n_head + ih) * n_embd,
                                        it * t->nb[dim] + ih * t->nb[1] * (dim == 2), n_embd * sizeof(float));
            }
        }
    }
}

void llama_hwkv_layerwise::store(const llama_ubatch & ubatch) {
    if (!active) {
        return;
    }

    for (const auto & [i, t] : live_out) {
        auto data = std::make_shared<std::vector<uint8_t>>(ggml_nbytes(t));

        ggml_backend_tensor_get(t, data->data(), 0, data->size());

        state[key_of(i, t)] = std::move(data);
    }

    if (const auto * c = cut_of(il_from)) {
        capture(ubatch, c->out, 1, result.out);
    }
    if (const auto * c = cut_of(il_to)) {
        capture(ubatch, c->q, 2, result.q);

        result.scale = c->scale;

        if (c->sinks && result.sinks.empty()) {
            GGML_ASSERT(c->sinks->type == GGML_TYPE_F32);

            result.sinks.resize(ggml_nelements(c->sinks));

            ggml_backend_tensor_get(c->sinks, result.sinks.data(), 0, ggml_nbytes(c->sinks));
        }
    }

    iu++;
}
