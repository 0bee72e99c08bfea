#pragma once

#include "llama.h"

#include <cstdint>

class llama_kv_cache;

// K [n_embd_k, n_pos] and V [n_embd_v, n_pos] of a layer as a cache holds them, at the positions 0, 1, ... of a sequence
//
// for calibration: the cache holds one KV head, and V is not transposed. false if the sequence has other positions
bool llama_hwkv_read_back(const llama_kv_cache & kv,
                          uint32_t               il,
                          llama_seq_id           seq_id,
                          uint32_t               n_pos,
                          float *                k,
                          float *                v);
