#include "llama-hwkv-footprint.h"

#include "../vendor/nlohmann/json.hpp"
#include "llama-hwkv-policy.h"
#include "llama-impl.h"

std::string llama_hwkv_footprint_json(const llama_hwkv_footprint & fp) {
    using json = nlohmann::ordered_json;

    json groups = json::array();

    for (const auto & g : fp.groups) {
        if (g.native_swa) {
            continue;
        }

        json layers = json::array();

        for (const auto & l : g.layers) {
            layers.push_back({
                { "layer", l.il        },
                { "heads", l.n_head_kv },
                { "bytes", l.bytes     }
            });
        }

        groups.push_back({
            { "window",  g.window == LLAMA_HWKV_FULL ? json(nullptr) : json(g.window) },
            { "cells",   g.n_cells                                                    },
            { "streams", g.n_stream                                                   },
            { "heads",   g.n_head_kv                                                  },
            { "bytes",   g.bytes                                                      },
            { "layers",  layers                                                       },
        });
    }

    return json({
                    { "active",           true                           },
                    { "fingerprint",      llama_hwkv_hex(fp.fingerprint) },
                    { "source",           fp.source                      },
                    { "n_sink",           fp.n_sink                      },
                    { "kv_bytes",         fp.kv_bytes                    },
                    { "full_kv_bytes",    fp.full_kv_bytes               },
                    { "checkpoint_bytes", fp.checkpoint_bytes            },
                    { "groups",           groups                         },
    })
        .dump(-1, ' ', false, json::error_handler_t::replace);  // a path can be anything
}

static double hwkv_mib(size_t bytes) {
    return bytes / 1024.0 / 1024.0;
}

std::vector<std::string> llama_hwkv_footprint_table(const llama_hwkv_footprint & fp) {
    std::vector<std::string> res;

    res.push_back(format("hwkv policy %s from %s", llama_hwkv_hex(fp.fingerprint).c_str(), fp.source.c_str()));

    if (fp.n_sink > 0) {
        res.push_back(format("besides its window, each head keeps the first %u positions of a sequence", fp.n_sink));
    }

    res.push_back("    window | layers | KV heads |    cells |        MiB");

    for (const auto & g : fp.groups) {
        const std::string window = g.window == LLAMA_HWKV_FULL ? "full" : std::to_string(g.window);

        res.push_back(format("%10s | %6zu | %8u | %8u | %10.2f%s", window.c_str(), g.layers.size(), g.n_head_kv,
                             g.n_cells, hwkv_mib(g.bytes), g.native_swa ? " (the model's own sliding window)" : ""));
    }

    res.push_back(
        format("KV cache of the configurable layers: %.2f MiB, with full windows it would be %.2f MiB (%.1f %% kept)",
               hwkv_mib(fp.kv_bytes), hwkv_mib(fp.full_kv_bytes), 100.0 * fp.kv_bytes / fp.full_kv_bytes));
    res.push_back(format("a context checkpoint takes up to %.2f MiB", hwkv_mib(fp.checkpoint_bytes)));

    return res;
}
