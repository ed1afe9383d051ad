"""From a GGUF file to the engine's own names, layouts and quantised forms.

Block formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from worker.model.config import DecoderConfig
from worker.model.quantization import AffineInt, Weight, stack_rows
from worker.model.weights import DecoderWeights, LayerWeights
from worker.weights.gguf import GGMLType, GGUFError, GGUFFile, GGUFTensor

_MOST: Final = 1 << 31
"""Above every count that a model's shape holds."""


def import_tensor(tensor: GGUFTensor) -> Weight:
    """A tensor in an inner form, without loss: ``AffineInt`` for Q4_0, Q4_1 and Q8_0, else dense fp32.

    Raises ``GGUFError`` for a type that has no inner form yet.
    """
    rows = tensor.data.shape[0]
    match tensor.type:
        case GGMLType.F32:
            dense = tensor.data.view(np.float32).reshape(tensor.shape)
            return torch.from_numpy(dense.copy())
        case GGMLType.F16:
            widened = tensor.data.view(np.float16).astype(np.float32)
            return torch.from_numpy(widened.reshape(tensor.shape))
        case GGMLType.BF16:
            bits = tensor.data.view(np.uint16).astype(np.uint32) << 16
            return torch.from_numpy(bits.view(np.float32).reshape(tensor.shape))
        case GGMLType.Q8_0:
            blocks = tensor.data.reshape(rows, -1, 34)
            # Signed to unsigned with the zero moved to 128: flipping the top bit adds 128 modulo 256.
            return AffineInt(
                bits=8,
                codes=torch.from_numpy((blocks[:, :, 2:] ^ 0x80).reshape(rows, -1)),
                scale=_halves(blocks, 0),
                zero_point=128,
            )
        case GGMLType.Q4_0:
            blocks = tensor.data.reshape(rows, -1, 18)
            return AffineInt(bits=4, codes=_codes(blocks, 2), scale=_halves(blocks, 0), zero_point=8)
        case GGMLType.Q4_1:
            blocks = tensor.data.reshape(rows, -1, 20)
            return AffineInt(bits=4, codes=_codes(blocks, 4), scale=_halves(blocks, 0), minimum=_halves(blocks, 2))
        case _:
            raise GGUFError(
                f"tensor {tensor.name!r} is stored as {tensor.type.name}, which can't be loaded; "
                "use a file of F32, F16, BF16, Q4_0, Q4_1 or Q8_0"
            )


def _halves(blocks: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> torch.Tensor:
    """The fp16 at byte ``offset`` of each block: ``[rows, blocks]``."""
    piece = np.array(blocks[:, :, offset : offset + 2])
    return torch.from_numpy(piece.view(np.float16).squeeze(-1))


def _codes(blocks: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> torch.Tensor:
    """The 4-bit codes from byte ``offset`` of each block on: GGUF packs them as ``kernels.gemm.dequantize`` does."""
    return torch.from_numpy(np.array(blocks[:, :, offset:]).reshape(blocks.shape[0], -1))


def decoder_config(metadata: dict[str, Any]) -> DecoderConfig:
    """The model's shape. Raises ``GGUFError`` if a value is missing or can't be, or the architecture is not known."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"architecture {architecture!r} is not supported (llama is)")

    def number(name: str, default: float | None = None) -> float:
        found = metadata.get(f"llama.{name}", default)
        if found is None:
            raise GGUFError(f"the metadata lacks llama.{name}")
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise GGUFError(f"llama.{name} is no number above 0")
        return float(found)

    def count(name: str, default: int | None = None) -> int:
        found = number(name, default)
        if not (found.is_integer() and found < _MOST):
            raise GGUFError(f"llama.{name} is {found:g}, no whole number below {_MOST}")
        return int(found)

    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise GGUFError("scaled rotary embedding (llama.rope.scaling) is not supported")
    heads = count("attention.head_count")
    hidden = count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    if count("rope.dimension_count", head_dim) != head_dim:
        raise GGUFError("rotary embedding of a part of each head is not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = count("vocab_size", len(tokens) if type(tokens) is list else None)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if any(end is not None and (type(end) is not int or not 0 <= end < vocab_size) for end in ends):
        raise GGUFError(f"an end token of {ends} is none of the vocabulary's {vocab_size}")
    return DecoderConfig(
        architecture=architecture,
        num_layers=count("block_count"),
        hidden_size=hidden,
        mlp_size=count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=count("context_length"),
        rope_base=number("rope.freq_base", 10000.0),
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def load_decoder(path: Path) -> DecoderWeights:
    """Import a whole model. Raises ``GGUFError`` if a tensor is missing, misshapen or of an unknown type."""
    file = GGUFFile(path)
    config = decoder_config(file.metadata)

    def weight(name: str, rows: int, columns: int) -> Weight:
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None:
            raise GGUFError(f"{path}: tensor {name}.weight is missing")
        if tensor.shape != (rows, columns):
            raise GGUFError(f"{path}: tensor {tensor.name} has shape {tensor.shape}, not {(rows, columns)}")
        return import_tensor(tensor)

    def vector(name: str) -> torch.Tensor:
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None or tensor.shape != (config.hidden_size,):
            raise GGUFError(f"{path}: tensor {name}.weight is missing or not a vector of {config.hidden_size}")
        imported = import_tensor(tensor)
        return imported.dequantize().flatten() if isinstance(imported, AffineInt) else imported

    unknown = [name for name in file.tensors if name.endswith(".bias") or name == "rope_freqs.weight"]
    if unknown:
        raise GGUFError(f"{path}: tensor {unknown[0]} is not supported by this architecture")
    hidden, mlp, query, kv = config.hidden_size, config.mlp_size, config.query_size, config.kv_size
    layers = []
    for index in range(config.num_layers):
        prefix = f"blk.{index}."
        # llama's converter already stores query and key rows in the order that rotates neighbours.
        layers.append(
            LayerWeights(
                attention_norm=vector(prefix + "attn_norm"),
                qkv=stack_rows(
                    [
                        weight(prefix + "attn_q", query, hidden),
                        weight(prefix + "attn_k", kv, hidden),
                        weight(prefix + "attn_v", kv, hidden),
                    ]
                ),
                attention_output=weight(prefix + "attn_output", hidden, query),
                mlp_norm=vector(prefix + "ffn_norm"),
                gate_up=stack_rows([weight(prefix + "ffn_gate", mlp, hidden), weight(prefix + "ffn_up", mlp, hidden)]),
                down=weight(prefix + "ffn_down", hidden, mlp),
            )
        )
    return DecoderWeights(
        config=config,
        embedding=weight("token_embd", config.vocab_size, hidden),
        layers=layers,
        norm=vector("output_norm"),
        head=weight("output", config.vocab_size, hidden) if "output.weight" in file.tensors else None,
    )
