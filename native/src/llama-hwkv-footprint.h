#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// what the memory of a context keeps under a policy, see llama_memory_hwkv::footprint()
struct llama_hwkv_footprint {
    struct layer {
        uint32_t il;
        uint32_t n_head_kv;
        size_t   bytes;
    };

    struct group {
        int32_t window;      // LLAMA_HWKV_FULL or positive
        bool    native_swa;  // the model's own sliding window

        uint32_t n_cells;    // of one stream
        uint32_t n_stream;
        uint32_t n_head_kv;  // of all layers
        size_t   bytes;

        std::vector<layer> layers;
    };

    // the policy
    std::string source;
    uint64_t    fingerprint;
    uint32_t    n_sink;

    std::vector<group> groups;

    size_t kv_bytes;          // of the configurable layers
    size_t full_kv_bytes;     // the same in upstream's cache
    size_t checkpoint_bytes;  // of one context checkpoint, at most
};

// see llama_hwkv_info()
std::string llama_hwkv_footprint_json(const llama_hwkv_footprint & fp);

// see llama_hwkv_table(): its lines
std::vector<std::string> llama_hwkv_footprint_table(const llama_hwkv_footprint & fp);
