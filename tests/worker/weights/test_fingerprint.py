from __future__ import annotations

from pathlib import Path

import pytest

from worker.weights.fingerprint import weights_digest

LARGE = 30 << 20
"""Read by samples, not whole."""


def write(path: Path, size: int, changed: int | None = None) -> Path:
    content = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    if changed is not None:
        content[changed] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size", [0, 1, 1000, LARGE])
def test_a_copy_has_the_same_digest_and_one_more_byte_another(tmp_path: Path, size: int) -> None:
    digest = weights_digest(write(tmp_path / "a.gguf", size))
    assert len(digest) == 32
    assert weights_digest(write(tmp_path / "b.gguf", size)) == digest
    assert weights_digest(write(tmp_path / "c.gguf", size + 1)) != digest


@pytest.mark.parametrize(
    ("size", "changed"),
    [(1000, 999), (5 << 20, 4 << 20), (LARGE, 0), (LARGE, (4 << 20) - 1), (LARGE, 4 << 20), (LARGE, LARGE - 1)],
)
def test_changes_are_seen(tmp_path: Path, size: int, changed: int) -> None:
    """Anywhere in a small file; in the head, and at both ends of what is sampled, of a large one."""
    digest = weights_digest(write(tmp_path / "model.gguf", size))
    assert weights_digest(write(tmp_path / "model.gguf", size, changed)) != digest


def test_a_stretch_of_other_weights_is_seen_wherever_it_lies(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", LARGE)
    digest = weights_digest(path)
    content = path.read_bytes()
    for begin in range(4 << 20, LARGE - 20_000, 5_234_567):
        path.write_bytes(content[:begin] + bytes(20_000) + content[begin + 20_000 :])
        assert weights_digest(path) != digest


def test_a_folder_counts_its_weights_and_their_names(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    write(one / "model-00001-of-00002.safetensors", 100)
    write(one / "model-00002-of-00002.safetensors", 200)
    (one / "config.json").write_text("{}")
    digest = weights_digest(one)
    (one / "README.md").write_text("what it is")
    assert weights_digest(one) == digest
    (one / "config.json").write_text('{"rope_theta": 1}')
    changed = weights_digest(one)
    assert changed != digest
    first, second = one / "model-00001-of-00002.safetensors", one / "model-00002-of-00002.safetensors"
    first.rename(one / "was.safetensors")
    second.rename(first)
    (one / "was.safetensors").rename(second)
    assert weights_digest(one) != changed


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weights_digest(tmp_path / "none.gguf")
