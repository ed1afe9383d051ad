"""From a Hugging Face folder (``config.json`` and ``*.safetensors``) to the engine's own names and layouts.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from worker.model.quantization import stack_rows
from worker.model.weights import DecoderWeights, LayerWeights
from worker.weights.checkpoint_config import CheckpointError, decoder_config, is_tied

CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_INDEX: Final = "model.safetensors.index.json"
_WHOLE: Final = "model.safetensors"

_TYPES: Final = ("F32", "F16", "BF16")
_IGNORED: Final = ".rotary_emb.inv_freq"
"""Old files hold this table, which follows from the configuration."""


def load_decoder(folder: Path) -> DecoderWeights:
    """Import a whole model. Raises ``CheckpointError`` if a file or a tensor is missing, misshapen or not supported."""
    try:
        return _load_decoder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _load_decoder(folder: Path) -> DecoderWeights:
    settings = _read_json(folder / CONFIG)
    generation = _read_json(folder / _GENERATION) if (folder / _GENERATION).exists() else {}
    config = decoder_config(settings, generation)
    hidden, mlp, query, kv = config.hidden_size, config.mlp_size, config.query_size, config.kv_size
    with _Tensors(folder) as tensors:

        def layer(prefix: str) -> LayerWeights:
            attention = prefix + "self_attn."
            bias = None
            if config.attention_bias:
                bias = torch.cat(
                    [
                        _interleaved(tensors.take(attention + "q_proj.bias", query), config.head_dim),
                        _interleaved(tensors.take(attention + "k_proj.bias", kv), config.head_dim),
                        tensors.take(attention + "v_proj.bias", kv),
                    ]
                )
            return LayerWeights(
                attention_norm=tensors.take(prefix + "input_layernorm.weight", hidden),
                qkv=stack_rows(
                    [
                        _interleaved(tensors.take(attention + "q_proj.weight", query, hidden), config.head_dim),
                        _interleaved(tensors.take(attention + "k_proj.weight", kv, hidden), config.head_dim),
                        tensors.take(attention + "v_proj.weight", kv, hidden),
                    ]
                ),
                attention_output=tensors.take(attention + "o_proj.weight", hidden, query),
                mlp_norm=tensors.take(prefix + "post_attention_layernorm.weight", hidden),
                gate_up=stack_rows(
                    [
                        tensors.take(prefix + "mlp.gate_proj.weight", mlp, hidden),
                        tensors.take(prefix + "mlp.up_proj.weight", mlp, hidden),
                    ]
                ),
                down=tensors.take(prefix + "mlp.down_proj.weight", hidden, mlp),
                qkv_bias=bias,
            )

        weights = DecoderWeights(
            config=config,
            embedding=tensors.take("model.embed_tokens.weight", config.vocab_size, hidden),
            layers=[layer(f"model.layers.{index}.") for index in range(config.num_layers)],
            norm=tensors.take("model.norm.weight", hidden),
            head=None if is_tied(settings) else tensors.take("lm_head.weight", config.vocab_size, hidden),
        )
        # A tied head may be stored once more.
        tensors.check_all_taken(but=["lm_head.weight"])
    return weights


def _interleaved(projection: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The rows of a projection in the order that ``kernels.rope`` wants: dimensions ``i`` and ``i + head_dim / 2`` of
    each head, which these files pair, next to each other."""
    rows = torch.arange(len(projection)).view(-1, 2, head_dim // 2).transpose(1, 2).reshape(-1)
    return projection.index_select(0, rows)


class _Tensors:
    """The tensors of all a folder's files, by name."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()
        with contextlib.ExitStack() as opening:
            for path in _weight_files(folder):
                try:
                    file = opening.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path.name} can't be read: {error}") from None
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in self._files:
                        raise CheckpointError(f"tensor {name} stands in several files")
                    self._files[name] = file
            self._stack = opening.pop_all()

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A copy of the tensor, in the type in which it is stored."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing")
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(stored.get_shape())}, not {shape}")
        if stored.get_dtype() not in _TYPES:
            raise CheckpointError(f"tensor {name} is stored as {stored.get_dtype()}; {', '.join(_TYPES)} can be loaded")
        self._taken.add(name)
        # The file is mapped: what is kept must not change or vanish with it.
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor.clone()

    def check_all_taken(self, but: Iterable[str]) -> None:
        """Raise for a tensor that was not taken: what it is for would be left out of the computation."""
        left = sorted(self._files.keys() - self._taken - set(but))
        unknown = [name for name in left if not name.endswith(_IGNORED)]
        if unknown:
            raise CheckpointError(f"tensor {unknown[0]} is not supported by this architecture")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        named = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{_INDEX} has no weight_map")
        names = sorted({str(name) for name in named.values()})
        for name in names:
            if Path(name).name != name or name == "..":
                raise CheckpointError(f"{_INDEX} names {name!r}, which is no file of this folder")
            if not (folder / name).exists():
                raise CheckpointError(f"{name} is missing, though {_INDEX} names it")
        return [folder / name for name in names]
    if (folder / _WHOLE).exists():
        return [folder / _WHOLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("there is no .safetensors file")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
