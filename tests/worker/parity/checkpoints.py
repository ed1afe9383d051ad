"""Tiny random checkpoints, one for each kind of attention, and what ``transformers`` makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

WINDOW = 40
"""No multiple of a block, and less than a chunk."""

VOCABULARY = 500
CONTEXT = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_QWEN2: dict[str, Any] = _SIZES | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW}


def _layers(kinds: str) -> list[str]:
    return [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]


CONFIGS = {
    "gqa": LlamaConfig(**_SIZES | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mha": LlamaConfig(
        **_SIZES | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    ),
    "mqa": LlamaConfig(**_SIZES | {"num_key_value_heads": 1, "head_dim": 32}),
    "sliding": MistralConfig(**_SIZES, sliding_window=WINDOW),
    "biased": Qwen2Config(**_SIZES | {"tie_word_embeddings": True}),
    "mixed": Qwen2Config(**_QWEN2, layer_types=_layers("sfsf")),
    "uneven": Qwen2Config(**_QWEN2, max_window_layers=1),
}
"""``uneven`` has one full layer and three with a window: four cache groups of one layer."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder as ``save_pretrained`` writes it, and the model that it was written from."""

    name: str
    path: Path
    model: Any

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """After each token: ``[tokens, vocab]``."""
        result: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return result


def make(name: str, folder: Path, **save: Any) -> Checkpoint:
    """The checkpoint of that name, the same each time. Every parameter is random, norms and biases too, and so large
    that attention is far from even: a key too many or too few shows."""
    generator = torch.Generator().manual_seed(sorted(CONFIGS).index(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(generator=generator).mul_(0.15)
            if parameter_name.endswith("norm.weight"):
                parameter.add_(1.0)
    model.save_pretrained(folder, **save)
    return Checkpoint(name, folder, model)


def changed(checkpoint: Checkpoint, **settings: Any) -> Checkpoint:
    """The same weights under another configuration, in ``transformers`` only."""
    config = AutoConfig.from_pretrained(checkpoint.path, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.load_state_dict(checkpoint.model.state_dict())
    return Checkpoint(checkpoint.name, checkpoint.path, model)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()
