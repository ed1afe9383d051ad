"""Folders that are no checkpoint, or one that would not be computed rightly, are refused by name. That the others are
loaded rightly is seen in the parity tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.parity.checkpoints import CONFIGS, make
from worker.model.weights import DecoderWeights
from worker.weights.checkpoint_config import CheckpointError, decoder_config, is_tied
from worker.weights.loading import load_decoder
from worker.weights.source import ModelNotFound, resolve_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> DecoderWeights:
    return load_decoder(make("mixed", tmp_path_factory.mktemp("whole")).path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("mixed", tmp_path).path


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def same(left: DecoderWeights, right: DecoderWeights) -> bool:
    assert isinstance(left.layers[1].qkv, torch.Tensor)
    assert isinstance(right.layers[1].qkv, torch.Tensor)
    return left.config == right.config and torch.equal(left.layers[1].qkv, right.layers[1].qkv)


def test_shards_are_read_by_their_index(tmp_path: Path, whole: DecoderWeights) -> None:
    make("mixed", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same(load_decoder(tmp_path), whole)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another layout, not in the index")
    assert same(load_decoder(tmp_path), whole)
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing, though"):
        load_decoder(tmp_path)


def test_rows_are_put_in_the_order_of_our_rotation(folder: Path, whole: DecoderWeights) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer, dim = whole.layers[0], whole.config.head_dim
    assert isinstance(layer.qkv, torch.Tensor)
    assert layer.qkv_bias is not None
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(layer.qkv[0:4], query[[0, dim // 2, 1, dim // 2 + 1]])
    assert torch.equal(layer.qkv[dim], query[dim])
    key = tensors["model.layers.0.self_attn.k_proj.bias"]
    assert torch.equal(layer.qkv_bias[whole.config.query_size :][:dim:2], key[: dim // 2])
    value = tensors["model.layers.0.self_attn.v_proj.weight"]
    assert torch.equal(layer.qkv[-len(value) :], value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_stay_so(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    weights = load_decoder(folder)
    for weight in (weights.embedding, weights.layers[0].qkv, weights.layers[0].gate_up, weights.norm):
        assert isinstance(weight, torch.Tensor)
        assert weight.dtype == dtype


def test_a_head_is_read_unless_the_embedding_serves(tmp_path: Path) -> None:
    tied, untied = make("gqa", tmp_path / "tied").path, make("mha", tmp_path / "untied").path
    assert load_decoder(tied).head is None
    assert load_decoder(untied).head is not None
    edit(tied / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load_decoder(tied)
    edit(untied / "config.json", tie_word_embeddings=True)
    assert load_decoder(untied).head is None


def test_weights_that_can_not_be_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    wrong = {
        "model.layers.3.mlp.down_proj.weight is missing": {"model.layers.3.mlp.down_proj.weight": None},
        r"model.norm.weight has shape \(3,\), not \(64,\)": {"model.norm.weight": torch.zeros(3)},
        "model.norm.weight is stored as I32": {"model.norm.weight": torch.zeros(64, dtype=torch.int32)},
        "model.layers.0.self_attn.o_proj.bias is not supported": {
            "model.layers.0.self_attn.o_proj.bias": torch.zeros(64)
        },
        "model.layers.4.input_layernorm.weight is not supported": {
            "model.layers.4.input_layernorm.weight": torch.zeros(64)
        },
    }
    for message, changes in wrong.items():
        save_file({k: v for k, v in (tensors | changes).items() if v is not None}, path)
        with pytest.raises(CheckpointError, match=message) as raised:
            load_decoder(folder)
        assert str(folder) in str(raised.value)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    load_decoder(folder)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read"):
        load_decoder(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(CheckpointError, match="no file of this folder"):
        load_decoder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": ".."}}')
    with pytest.raises(CheckpointError, match="no file of this folder"):
        load_decoder(folder)
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_decoder(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_decoder(folder)


def test_sizes_beyond_the_tensors_cost_no_memory(folder: Path) -> None:
    """What a configuration claims is held against the file before anything of that size is made."""
    huge = (1 << 31) - 8
    original = (folder / "config.json").read_text()
    for changes in (
        {"num_attention_heads": huge, "head_dim": 16},
        {"num_attention_heads": huge, "head_dim": huge},
        {"hidden_size": huge},
        {"intermediate_size": huge},
        {"vocab_size": huge},
    ):
        edit(folder / "config.json", **changes)
        with pytest.raises(CheckpointError, match="has shape"):
            load_decoder(folder)
        (folder / "config.json").write_text(original)


LLAMA = CONFIGS["mha"].to_dict() | {"architectures": ["LlamaForCausalLM"]}
QWEN2 = CONFIGS["uneven"].to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not supported \(llama, mistral, qwen2 are\)"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters of type 'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope_parameters\.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_parameters\.rope_theta is -1\.0"),
        ({"rope_parameters": 1}, "rope_parameters is no object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 64}, "sliding_window is not supported for llama"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "there is no sliding_window"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": 1 << 30}, "no whole number up to 4096"),
        ({"hidden_size": 10**400}, "hidden_size is a number of 1329 bits"),
        ({"architectures": 5}, "architectures is 5"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 5, "head_dim": None}, "does not divide among 5 heads"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3 KV heads"),
        ({"head_dim": 15}, "can't be rotated in pairs"),
        ({"eos_token_id": 500}, "eos_token_id 500 is none of the vocabulary's 500"),
        ({"eos_token_id": ["x"]}, "eos_token_id 'x'"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    decoder_config(LLAMA)
    with pytest.raises(CheckpointError, match=message):
        decoder_config(LLAMA | changes)


def test_windows_of_each_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    explicit = QWEN2 | {"layer_types": kinds}
    assert decoder_config(QWEN2).windows == (None, 40, 40, 40)
    assert decoder_config(explicit).windows == (40, None, None, 40)
    by_depth = {name: value for name, value in QWEN2.items() if name != "layer_types"}
    assert decoder_config(by_depth).windows == (None, 40, 40, 40)
    assert decoder_config(by_depth | {"max_window_layers": 0}).windows == (40,) * 4
    assert decoder_config(by_depth | {"use_sliding_window": False}).windows == (None,) * 4
    with pytest.raises(CheckpointError, match="there is no sliding_window"):
        decoder_config(explicit | {"use_sliding_window": False})
    mistral = CONFIGS["sliding"].to_dict()
    assert decoder_config(mistral).windows == (40, 40)
    assert decoder_config(mistral | {"sliding_window": None}).windows == (None, None)
    del mistral["sliding_window"]
    assert decoder_config(mistral).windows == (4096, 4096)
    with pytest.raises(CheckpointError, match="several kinds"):
        decoder_config(mistral | {"layer_types": ["sliding_attention", "full_attention"]})


def test_values_by_their_older_names_and_where_they_are_missing() -> None:
    old = {name: value for name, value in LLAMA.items() if name not in ("rope_parameters", "num_key_value_heads")}
    config = decoder_config(old | {"rope_theta": 5e5, "rope_scaling": None, "eos_token_id": [7, 8]})
    assert (config.rope_base, config.num_kv_heads, config.eos_token_ids) == (5e5, 4, (7, 8))
    assert decoder_config(old).rope_base == 10_000.0
    assert decoder_config(old | {"eos_token_id": 7}, {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)
    assert not is_tied(old)


def test_resolve_model_takes_a_folder(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder.resolve()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no \.gguf file in .* nor config\.json with \.safetensors"):
        resolve_model(str(folder))
