"""The peer and the oracle: transformers' Llama over the very weights that the engine computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.model.quantization import AffineInt
from worker.weights.gguf import GGUFFile
from worker.weights.gguf_import import import_tensor


def load_reference(path: Path) -> Any:
    """A ``LlamaForCausalLM`` in fp32 on CPU with the de-quantised weights of a GGUF file of the llama architecture.

    transformers pairs dimension ``i`` of a head with ``i + half`` for rotation, the file ``2i`` with ``2i + 1``: the
    rows of the query and key projections are put in transformers' order. The output head is the embedding.
    """
    file = GGUFFile(path)
    metadata = file.metadata
    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )

    def dense(name: str) -> torch.Tensor:
        weight = import_tensor(file.tensors[f"{name}.weight"])
        return weight.dequantize() if isinstance(weight, AffineInt) else weight

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        rows, columns = weight.shape
        return weight.view(count, rows // count // 2, 2, columns).transpose(1, 2).reshape(rows, columns)

    state = {"model.embed_tokens.weight": dense("token_embd"), "model.norm.weight": dense("output_norm")}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        state |= {
            f"{theirs}.input_layernorm.weight": dense(f"{ours}.attn_norm"),
            f"{theirs}.self_attn.q_proj.weight": halves(dense(f"{ours}.attn_q"), heads),
            f"{theirs}.self_attn.k_proj.weight": halves(dense(f"{ours}.attn_k"), kv_heads),
            f"{theirs}.self_attn.v_proj.weight": dense(f"{ours}.attn_v"),
            f"{theirs}.self_attn.o_proj.weight": dense(f"{ours}.attn_output"),
            f"{theirs}.post_attention_layernorm.weight": dense(f"{ours}.ffn_norm"),
            f"{theirs}.mlp.gate_proj.weight": dense(f"{ours}.ffn_gate"),
            f"{theirs}.mlp.up_proj.weight": dense(f"{ours}.ffn_up"),
            f"{theirs}.mlp.down_proj.weight": dense(f"{ours}.ffn_down"),
        }
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=False, assign=True)
    if missing.unexpected_keys or missing.missing_keys not in ([], ["lm_head.weight"]):
        raise ValueError(f"the weights do not fit transformers' Llama: {missing}")
    model.tie_weights()
    # The rotary table is no part of the state: it is computed anew, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
