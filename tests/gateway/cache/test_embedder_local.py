"""The model in process, as installed: what it makes of texts, alone and in batches."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.cache.embedder import TooLong
from gateway.cache.local_embedder import MOST_TOKENS, EmbedderUnavailable, LocalEmbedder, find_file


@pytest.fixture
async def embedder() -> AsyncIterator[LocalEmbedder]:
    async with LocalEmbedder() as made:
        yield made


async def cosine(embedder: LocalEmbedder, one: str, other: str) -> float:
    first, second = [np.frombuffer(await embedder.embed(text), dtype=np.float32) for text in (one, other)]
    return float(first @ second)


async def test_meanings_lie_near_each_other(embedder: LocalEmbedder) -> None:
    asked = "How do I reset my password?"
    near = await cosine(embedder, asked, "What are the steps to reset my password?")
    far = await cosine(embedder, asked, "The stock market crashed in 1929.")
    assert near > 0.9
    assert far < 0.2
    # Why there are guards.
    assert await cosine(embedder, "Is it safe to eat raw salmon?", "Is it not safe to eat raw salmon?") > 0.95


async def test_vectors_have_length_one_and_the_size_that_is_told(embedder: LocalEmbedder) -> None:
    for text in ("a", "", "日本の首都", "🙂", "x" * 300, "How?\n\nWhy\x00"):
        vector = np.frombuffer(await embedder.embed(text), dtype=np.float32)
        assert vector.shape == (embedder.dimensions,)
        assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-5)


async def test_a_batch_changes_no_direction(embedder: LocalEmbedder) -> None:
    texts = ["Why?", "How do I sort a list?", "word " * 100, "What is the capital of France, and why is it Paris?"]
    together = await asyncio.gather(*map(embedder.embed, texts))
    async with LocalEmbedder() as other:
        for text, vector in zip(texts, together, strict=True):
            alone = await other.embed(text)
            assert float(np.frombuffer(alone, np.float32) @ np.frombuffer(vector, np.float32)) > 0.999


async def test_what_is_longer_than_the_model_reads_is_refused(embedder: LocalEmbedder) -> None:
    longest = "word " * (MOST_TOKENS - 2)  # and two tokens around them
    assert await embedder.embed(longest)
    for text in (longest + "word", "word " * 100_000):
        with pytest.raises(TooLong):
            await embedder.embed(text)


async def test_the_event_loop_goes_on_meanwhile(embedder: LocalEmbedder) -> None:
    task = asyncio.create_task(embedder.embed("word " * 200))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 1


def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        EmbedderUnavailable, match=r"model\.onnx of the package nothing_here: install penstock\[cache\]"
    ):
        find_file("nothing_here", "model.onnx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbedderUnavailable, match="lacks onnxruntime"):
        LocalEmbedder(tmp_path / "model.onnx", tmp_path / "tokenizer.json")


async def test_a_file_that_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    async with LocalEmbedder(tmp_path / "model.onnx") as embedder:
        for _ in range(2):
            with pytest.raises(EmbedderUnavailable, match="cannot be loaded"):
                await embedder.embed("a")


def test_importing_it_loads_no_library() -> None:
    program = (
        "import gateway.cache.local_embedder, sys; print({'onnxruntime', 'tokenizers', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "set()"


def test_texts_of_a_length_run_together_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = LocalEmbedder()
    embedder._load()
    runs: list[list[int]] = []
    run_model = embedder._run_model

    def counted(session: Any, rows: list[list[int]]) -> list[bytes]:
        runs.append([len(row) for row in rows])
        return run_model(session, rows)

    monkeypatch.setattr(embedder, "_run_model", counted)
    embedder._vectors(["word " * 150, "short", "word " * 160, "a few more words"])
    assert [len(run) for run in runs] == [2, 2]
    assert all(one[-1] < other[0] for one, other in pairwise(runs))
    embedder._thread.shutdown()
