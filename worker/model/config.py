"""The shape of a decoder-only model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_LAYERS: Final = 4096
"""Above every model there is: a file that names more must not cost memory for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    architecture: str
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float
    eos_token_ids: tuple[int, ...]
    attention_bias: bool = False
    """Whether something is added to queries, keys and values."""
    windows: tuple[int | None, ...] = ()
    """For each layer how many tokens a token sees, itself included; None: all before it. Empty: None for each layer."""

    def __post_init__(self) -> None:
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"{self.num_layers} layers are more than the {MOST_LAYERS} that can be loaded")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"an attention window of {self.windows} is below 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"a head of {self.head_dim} dimensions can't be rotated in pairs")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys; the values are as wide."""
        return self.num_kv_heads * self.head_dim
