#include "llama-hwkv-read-back.h"

#include "ggml-backend.h"
#include "llama-kv-cache.h"

#include <cstring>
#include <vector>

namespace {

// the rows of a stream in a tensor [n_embd, n_cells, n_stream], in one piece: a device takes long for many small reads
struct hwkv_rows {
    hwkv_rows(const ggml_tensor * t, uint32_t stream) : t(t), data(t->nb[2]) {
        ggml_backend_tensor_get(t, data.data(), stream * t->nb[2], data.size());
    }

    void read(uint32_t i, float * dst) const {
        const auto * row = data.data() + i * t->nb[1];

        if (t->type == GGML_TYPE_F32) {
            memcpy(dst, row, t->ne[0] * sizeof(float));
        } else {
            ggml_get_type_traits(t->type)->to_float(row, dst, t->ne[0]);
        }
    }

    const ggml_tensor *  t;
    std::vector<uint8_t> data;
};

}  // namespace

bool llama_hwkv_read_back(const llama_kv_cache & kv,
                          uint32_t               il,
                          llama_seq_id           seq_id,
                          uint32_t               n_pos,
                          float *                k,
                          float *                v) {
    const auto & cells = kv.get_cells(seq_id);

    const hwkv_rows rows_k(kv.get_k_storage(il), kv.get_stream(seq_id));
    const hwkv_rows rows_v(kv.get_v_storage(il), kv.get_stream(seq_id));

    uint32_t n_found = 0;

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i) || !cells.seq_has(i, seq_id)) {
            continue;
        }

        const llama_pos pos = cells.pos_get(i);

        if (pos < 0 || (uint32_t) pos >= n_pos) {
            return false;
        }

        rows_k.read(i, k + (size_t) pos * rows_k.t->ne[0]);
        rows_v.read(i, v + (size_t) pos * rows_v.t->ne[0]);

        n_found++;
    }

    return n_found == n_pos;
}
