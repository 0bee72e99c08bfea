"""Small GGUFs with seeded random F32 weights, made to show a wrong window clearly.

They have no tokenizer: feed token ids. Query and key projections are scaled up so that attention is peaked, not
an average over the whole history in which a single far key would drown.
"""

import gguf
import numpy as np


class _Writer:
    """A GGUF under construction with tensors drawn from one seeded source."""

    def __init__(self, path, architecture, seed):
        self.rng = np.random.default_rng(seed)
        self.gguf = gguf.GGUFWriter(path, architecture)
        self.gguf.add_tokenizer_model("no_vocab")

    def matrix(self, name, n_out, n_in, gain=1.0):
        values = self.rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)
        self.gguf.add_tensor(name, values.astype(np.float32))

    def vector(self, name, size, mean=1.0, spread=0.2):
        values = mean + spread * self.rng.standard_normal(size)
        self.gguf.add_tensor(name, values.astype(np.float32))

    def close(self):
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def write_llama(path, seed, n_layer=1, n_head=8, n_head_kv=4, head_dim=32, n_vocab=256, n_ff=192):
    """Dense llama. With one layer, what a token sees of the past is exactly what its KV heads' windows show."""
    n_embd = n_head * head_dim // 2
    w = _Writer(path, "llama", seed)
    w.gguf.add_context_length(8192)
    w.gguf.add_vocab_size(n_vocab)
    w.gguf.add_embedding_length(n_embd)
    w.gguf.add_block_count(n_layer)
    w.gguf.add_feed_forward_length(n_ff)
    w.gguf.add_head_count(n_head)
    w.gguf.add_head_count_kv(n_head_kv)
    w.gguf.add_key_length(head_dim)
    w.gguf.add_value_length(head_dim)
    w.gguf.add_rope_dimension_count(head_dim)
    w.gguf.add_rope_freq_base(10000.0)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.matrix("token_embd.weight", n_vocab, n_embd, gain=np.sqrt(n_embd))
    w.vector("output_norm.weight", n_embd)
    w.matrix("output.weight", n_vocab, n_embd)
    for layer in range(n_layer):
        name = f"blk.{layer}.".__add__
        w.vector(name("attn_norm.weight"), n_embd)
        w.matrix(name("attn_q.weight"), n_head * head_dim, n_embd, gain=1.5)
        w.matrix(name("attn_k.weight"), n_head_kv * head_dim, n_embd, gain=1.5)
        w.matrix(name("attn_v.weight"), n_head_kv * head_dim, n_embd)
        w.matrix(name("attn_output.weight"), n_embd, n_head * head_dim, gain=2.0)
        w.vector(name("ffn_norm.weight"), n_embd)
        w.matrix(name("ffn_gate.weight"), n_ff, n_embd)
        w.matrix(name("ffn_up.weight"), n_ff, n_embd)
        w.matrix(name("ffn_down.weight"), n_embd, n_ff)
    w.close()


def write_qwen35(path, seed, n_layer=6, interval=3, n_head=8, n_head_kv=4, head_dim=64, n_vocab=256, n_ff=192):
    """Hybrid with two full-attention layers by default, 4 KV heads, and fewer key than value heads in its delta net."""
    n_embd, linear_dim, linear_k_heads, linear_v_heads, taps = 128, 16, 2, 4, 4
    key_width, value_width = linear_dim * linear_k_heads, linear_dim * linear_v_heads
    w = _Writer(path, "qwen35", seed)
    w.gguf.add_context_length(8192)
    w.gguf.add_vocab_size(n_vocab)
    w.gguf.add_embedding_length(n_embd)
    w.gguf.add_block_count(n_layer)
    w.gguf.add_feed_forward_length(n_ff)
    w.gguf.add_head_count(n_head)
    w.gguf.add_head_count_kv(n_head_kv)
    w.gguf.add_key_length(head_dim)
    w.gguf.add_value_length(head_dim)
    w.gguf.add_rope_dimension_count(16)
    w.gguf.add_rope_dimension_sections([3, 3, 2, 0])
    w.gguf.add_rope_freq_base(10000.0)
    w.gguf.add_layer_norm_rms_eps(1e-6)
    w.gguf.add_ssm_conv_kernel(taps)
    w.gguf.add_ssm_state_size(linear_dim)
    w.gguf.add_ssm_group_count(linear_k_heads)
    w.gguf.add_ssm_time_step_rank(linear_v_heads)
    w.gguf.add_ssm_inner_size(value_width)
    w.gguf.add_full_attention_interval(interval)
    w.matrix("token_embd.weight", n_vocab, n_embd, gain=np.sqrt(n_embd))
    w.vector("output_norm.weight", n_embd)
    w.matrix("output.weight", n_vocab, n_embd)
    for layer in range(n_layer):
        name = f"blk.{layer}.".__add__
        w.vector(name("attn_norm.weight"), n_embd)
        w.vector(name("post_attention_norm.weight"), n_embd)
        if (layer + 1) % interval == 0:
            w.matrix(name("attn_q.weight"), 2 * n_head * head_dim, n_embd)
            w.matrix(name("attn_k.weight"), n_head_kv * head_dim, n_embd)
            w.matrix(name("attn_v.weight"), n_head_kv * head_dim, n_embd)
            w.matrix(name("attn_output.weight"), n_embd, n_head * head_dim, gain=4.0)
            # q and k have unit rms before these weights: scores get a spread of about 1.6^2
            w.vector(name("attn_q_norm.weight"), head_dim, mean=1.6)
            w.vector(name("attn_k_norm.weight"), head_dim, mean=1.6)
        else:
            w.matrix(name("attn_qkv.weight"), 2 * key_width + value_width, n_embd)
            w.matrix(name("attn_gate.weight"), value_width, n_embd)
            w.matrix(name("ssm_beta.weight"), linear_v_heads, n_embd)
            w.matrix(name("ssm_alpha.weight"), linear_v_heads, n_embd)
            w.matrix(name("ssm_conv1d.weight"), 2 * key_width + value_width, taps)
            w.vector(name("ssm_a"), linear_v_heads, mean=-0.3, spread=0.05)
            w.vector(name("ssm_dt.bias"), linear_v_heads, mean=-2.0)
            w.vector(name("ssm_norm.weight"), linear_dim)
            w.matrix(name("ssm_out.weight"), n_embd, value_width)
        w.matrix(name("ffn_gate.weight"), n_ff, n_embd)
        w.matrix(name("ffn_up.weight"), n_ff, n_embd)
        w.matrix(name("ffn_down.weight"), n_embd, n_ff)
    w.close()
