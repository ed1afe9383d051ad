"""The shape of a model from the ``config.json`` of a Hugging Face checkpoint.

Where a value is missing, it is what ``transformers`` takes it to be for that family. What would change the answers and
is not supported is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from worker.model.config import MOST_LAYERS, DecoderConfig

_MOST: Final = 1 << 31
"""Above every count that a model's shape holds."""

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
"""By ``model_type``: what missing values are taken to be."""

_CLASSES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SHARED_DEFAULTS: Final = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}

_SUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
}
"""Settings that change what is computed, and the values for which it is what is computed here."""

_ROPE_KEYS: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


class CheckpointError(ValueError):
    """The folder is no checkpoint that can be loaded; the message says why, and names the file."""


class _Settings:
    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**_SHARED_DEFAULTS, **defaults, **values}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def number(self, name: str) -> float:
        found = self._values.get(name)
        if found is None:
            raise CheckpointError(f"config.json lacks {name}")
        if type(found) is int and found.bit_length() > 64:  # JSON's whole numbers may be longer than a float's
            raise CheckpointError(f"config.json: {name} is a number of {found.bit_length()} bits")
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise CheckpointError(f"config.json: {name} is {found!r}, no number above 0")
        return float(found)

    def count(self, name: str, default: int | None = None, most: int = _MOST - 1) -> int:
        if default is not None and self._values.get(name) is None:
            return default
        found = self.number(name)
        if not (found.is_integer() and found <= most):
            raise CheckpointError(f"config.json: {name} is {found:g}, no whole number up to {most}")
        return int(found)

    def flag(self, name: str) -> bool:
        found = self._values.get(name)
        if found not in (True, False, None):
            raise CheckpointError(f"config.json: {name} is {found!r}, neither true nor false")
        return bool(found)


def decoder_config(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """The shape, from ``config.json`` and, for the tokens that end generation, ``generation_config.json`` as well.

    Raises ``CheckpointError`` if a value is missing, can't be or is not supported.
    """
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {family!r} is not supported ({known} are)")
    classes = values.get("architectures")
    if classes and not (isinstance(classes, list) and _CLASSES[family] in classes):
        raise CheckpointError(
            f"config.json: architectures is {classes!r}; of this family {_CLASSES[family]} is supported"
        )
    for name, supported in _SUPPORTED.items():
        if values.get(name) not in supported:
            raise CheckpointError(f"config.json: {name} {values[name]!r} is not supported")

    settings = _Settings(values, FAMILIES[family])
    layers = settings.count("num_hidden_layers", most=MOST_LAYERS)
    heads, hidden = settings.count("num_attention_heads"), settings.count("hidden_size")
    if values.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden} does not divide among {heads} heads")
    vocab_size = settings.count("vocab_size")
    try:
        return DecoderConfig(
            architecture=family,
            num_layers=layers,
            hidden_size=hidden,
            mlp_size=settings.count("intermediate_size"),
            num_heads=heads,
            num_kv_heads=settings.count("num_key_value_heads", heads),
            head_dim=settings.count("head_dim", hidden // heads),
            vocab_size=vocab_size,
            context_length=settings.count("max_position_embeddings"),
            rope_base=_rope_base(settings),
            norm_epsilon=settings.number("rms_norm_eps"),
            eos_token_ids=_eos_token_ids(values, generation or {}, vocab_size),
            attention_bias=family == "qwen2",
            windows=_windows(family, settings, layers),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def is_tied(values: Mapping[str, Any]) -> bool:
    """Whether the embedding serves as head too."""
    return _Settings(values, {}).flag("tie_word_embeddings")


def _rope_base(settings: _Settings) -> float:
    """``rope_parameters`` is what ``rope_theta`` and ``rope_scaling`` were in files of transformers 4."""
    for name in ("rope_scaling", "rope_parameters"):
        given = settings.get(name)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise CheckpointError(f"config.json: {name} is no object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config.json: {name} of type {kind!r} is not supported")
        if unknown := sorted(given.keys() - _ROPE_KEYS):
            raise CheckpointError(f"config.json: {name}.{unknown[0]} is not supported")
        if given.get("partial_rotary_factor") not in _SUPPORTED["partial_rotary_factor"]:
            raise CheckpointError(f"config.json: {name}.partial_rotary_factor is not supported")
        if given.get("rope_theta") is not None:
            return _Settings({f"{name}.rope_theta": given["rope_theta"]}, {}).number(f"{name}.rope_theta")
    return settings.number("rope_theta")


def _windows(family: str, settings: _Settings, layers: int) -> tuple[int | None, ...]:
    kinds = settings.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise CheckpointError(
                f"config.json: layer_types is {kinds!r}; it must name full_attention or sliding_attention for each of "
                f"{layers} layers"
            )
    wanted = settings.get("sliding_window")
    if family == "llama" and wanted is not None:
        raise CheckpointError("config.json: sliding_window is not supported for llama")
    if family == "qwen2" and not settings.flag("use_sliding_window"):
        wanted = None
    window = None if wanted is None else settings.count("sliding_window")
    if kinds is None:
        first = settings.count("max_window_layers") if family == "qwen2" and settings.get("max_window_layers") else 0
        kinds = ["sliding_attention" if layer >= first and window else "full_attention" for layer in range(layers)]
    elif window is None and "sliding_attention" in kinds:
        raise CheckpointError("config.json: layer_types names sliding_attention, but there is no sliding_window")
    elif family == "mistral" and window is not None and "full_attention" in kinds:
        raise CheckpointError("config.json: layer_types of several kinds is not supported for mistral")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(values: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Those of both files: chat models name the end of a turn in the second only."""
    found = []
    for file, named in (("config.json", values), ("generation_config.json", generation)):
        ids = named.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise CheckpointError(f"{file}: eos_token_id {token!r} is none of the vocabulary's {vocab_size}")
            found.append(token)
    return tuple(dict.fromkeys(found))
