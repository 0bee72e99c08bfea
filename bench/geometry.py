"""What would a model take that does not fit this machine? Writes the GGUF of a known geometry: all keys and tensors, no
data.

    python bench/geometry.py -o build/Qwen3.6-27B-geometry.gguf
    hwkv plan build/Qwen3.6-27B-geometry.gguf -c 114688

The file claims its full size and takes a few KiB on the disk. Tensor types are those of a usual Q4_K_M mix. It has no
vocabulary and cannot be served; llama.cpp's dry run, and with it `hwkv plan`, needs no more.
"""

import argparse
import os
from pathlib import Path

from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

# Qwen3.6-27B: every 4th layer has full attention, the others are gated delta nets
N_LAYER, N_EMBD, N_FF, N_VOCAB, N_CTX_TRAIN = 64, 5120, 17408, 248320, 262144
N_HEAD, N_HEAD_KV, HEAD_DIM = 24, 4, 256
N_QK_HEADS, N_V_HEADS, DELTA_DIM, D_CONV = 16, 48, 128, 4


def tensors():
    """(name, shape as ggml counts it, type) of every tensor."""
    key_dim, value_dim = N_QK_HEADS * DELTA_DIM, N_V_HEADS * DELTA_DIM
    yield "token_embd.weight", (N_EMBD, N_VOCAB), T.Q4_K
    yield "output_norm.weight", (N_EMBD,), T.F32
    yield "output.weight", (N_EMBD, N_VOCAB), T.Q6_K
    for il in range(N_LAYER):
        # Q4_K_M keeps more bits in half of the layers
        better = T.Q6_K if il < N_LAYER // 8 or il >= 7 * N_LAYER // 8 or il % 3 == 2 else T.Q4_K
        block = [
            ("attn_norm.weight", (N_EMBD,), T.F32),
            ("post_attention_norm.weight", (N_EMBD,), T.F32),
            ("ffn_gate.weight", (N_EMBD, N_FF), T.Q4_K),
            ("ffn_up.weight", (N_EMBD, N_FF), T.Q4_K),
            ("ffn_down.weight", (N_FF, N_EMBD), better),
        ]
        if il % 4 == 3:
            block += [
                ("attn_q.weight", (N_EMBD, 2 * N_HEAD * HEAD_DIM), T.Q4_K),
                ("attn_k.weight", (N_EMBD, N_HEAD_KV * HEAD_DIM), T.Q4_K),
                ("attn_v.weight", (N_EMBD, N_HEAD_KV * HEAD_DIM), better),
                ("attn_output.weight", (N_HEAD * HEAD_DIM, N_EMBD), T.Q4_K),
                ("attn_q_norm.weight", (HEAD_DIM,), T.F32),
                ("attn_k_norm.weight", (HEAD_DIM,), T.F32),
            ]
        else:
            block += [
                ("attn_qkv.weight", (N_EMBD, 2 * key_dim + value_dim), T.Q4_K),
                ("attn_gate.weight", (N_EMBD, value_dim), T.Q4_K),
                ("ssm_conv1d.weight", (D_CONV, 2 * key_dim + value_dim), T.F32),
                ("ssm_dt.bias", (N_V_HEADS,), T.F32),
                ("ssm_a", (N_V_HEADS,), T.F32),
                ("ssm_beta.weight", (N_EMBD, N_V_HEADS), T.F32),
                ("ssm_alpha.weight", (N_EMBD, N_V_HEADS), T.F32),
                ("ssm_norm.weight", (DELTA_DIM,), T.F32),
                ("ssm_out.weight", (value_dim, N_EMBD), T.Q4_K),
            ]
        yield from ((f"blk.{il}.{name}", shape, type_) for name, shape, type_ in block)


def write(path, with_tensors=True):
    writer = GGUFWriter(path, "qwen35")
    writer.add_name("Qwen3.6-27B, geometry only")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_rope_freq_base(1e7)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_state_size(DELTA_DIM)
    writer.add_ssm_group_count(N_QK_HEADS)
    writer.add_ssm_time_step_rank(N_V_HEADS)
    writer.add_ssm_inner_size(N_V_HEADS * DELTA_DIM)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("none")
    n_bytes = 0
    for name, shape, type_ in tensors() if with_tensors else ():
        block, size = GGML_QUANT_SIZES[type_]
        n = size
        for ne in shape:
            n *= ne
        n_bytes += -(-n // block // 32) * 32
        writer.tensors[0][name] = _info(shape, type_, n // block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = -(-os.path.getsize(path) // 32) * 32
    os.truncate(path, header + n_bytes)


def _info(shape, type_, n_bytes):
    from gguf.gguf_writer import TensorInfo

    return TensorInfo(shape=tuple(reversed(shape)), dtype=type_, nbytes=n_bytes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.gguf", help="file to write")
    parser.add_argument("--no-tensors", action="store_true", help="only the keys: hwkv plan then has formulas alone")
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    write(args.output, not args.no_tensors)
    stat = args.output.stat()
    size, held = f"{stat.st_size / 2**30:.2f} GiB", f"{stat.st_blocks * 512 / 2**10:.0f} KiB"
    print(f"wrote {args.output}: {size} in name, {held} on the disk")


if __name__ == "__main__":
    main()
