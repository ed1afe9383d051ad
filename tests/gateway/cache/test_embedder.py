"""What embedders share: batches, sharing, remembering, and callers who leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.cache.embedder import BatchingEmbedder, Busy, EmbedderError, TooLong


class Gated(BatchingEmbedder):
    """A vector is its text; batches wait for the gate."""

    name, dimensions = "gated", 1

    def __init__(self, *, batch: int = 4, waiting: int = 100, remembered: int = 3) -> None:
        super().__init__(batch=batch, at_a_time=1, waiting=waiting, remembered=remembered)
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.batches: list[list[str]] = []
        self.fault: Exception | None = None

    async def embed_batch(self, texts: Sequence[str]) -> Sequence[bytes | EmbedderError]:
        self.batches.append(list(texts))
        self.begun.set()
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return [TooLong("long") if text == "long" else text.encode() for text in texts]


async def begun(embedder: Gated, *texts: str) -> list[asyncio.Task[bytes]]:
    """The first text is being embedded, the others wait."""
    first = asyncio.create_task(embedder.embed(texts[0]))
    await embedder.begun.wait()
    tasks = [first, *(asyncio.create_task(embedder.embed(text)) for text in texts[1:])]
    await asyncio.sleep(0)
    return tasks


async def test_what_waits_goes_as_one_batch_and_the_same_text_once() -> None:
    async with Gated() as embedder:
        tasks = await begun(embedder, "a", "b", "c", "b", "a")
        embedder.gate.set()
        assert await asyncio.gather(*tasks) == [b"a", b"b", b"c", b"b", b"a"]
        assert embedder.batches == [["a"], ["b", "c"]]


async def test_batches_have_a_limit() -> None:
    async with Gated(batch=2) as embedder:
        tasks = await begun(embedder, "a", "b", "c", "d")
        embedder.gate.set()
        await asyncio.gather(*tasks)
        assert embedder.batches == [["a"], ["b", "c"], ["d"]]


async def test_the_last_vectors_are_remembered() -> None:
    async with Gated(remembered=2) as embedder:
        embedder.gate.set()
        for text in ("a", "b", "a", "c", "a", "b"):
            assert await embedder.embed(text) == text.encode()
        assert embedder.batches == [["a"], ["b"], ["c"], ["b"]]


async def test_a_fault_is_its_text_s_alone_and_is_not_remembered() -> None:
    async with Gated() as embedder:
        tasks = await begun(embedder, "a", "long", "b")
        embedder.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [bytes, TooLong, bytes]
        with pytest.raises(TooLong):
            await embedder.embed("long")


@pytest.mark.parametrize("fault", [EmbedderError("away"), ValueError("a prompt")])
async def test_a_batch_that_fails_fails_for_all_and_the_next_goes_on(fault: Exception) -> None:
    async with Gated() as embedder:
        embedder.fault = fault
        embedder.gate.set()
        with pytest.raises(EmbedderError, match="away" if isinstance(fault, EmbedderError) else "ValueError$"):
            await embedder.embed("a")
        embedder.fault = None
        assert await embedder.embed("a") == b"a"


async def test_who_leaves_spares_the_work_unless_another_waits() -> None:
    async with Gated() as embedder:
        running, lonely, shared, other = await begun(embedder, "a", "b", "c", "c")
        lonely.cancel()
        shared.cancel()
        await asyncio.sleep(0)
        embedder.gate.set()
        assert await running == b"a"
        assert await other == b"c"
        assert embedder.batches == [["a"], ["c"]]


async def test_work_that_has_begun_is_remembered_though_its_caller_left() -> None:
    async with Gated() as embedder:
        running, other = await begun(embedder, "a", "b")
        running.cancel()
        await asyncio.sleep(0)
        embedder.gate.set()
        assert await other == b"b"
        assert await embedder.embed("a") == b"a"
        assert embedder.batches == [["a"], ["b"]]


async def test_a_text_left_and_asked_again_is_embedded() -> None:
    async with Gated() as embedder:
        _, left = await begun(embedder, "a", "b")
        left.cancel()
        again = asyncio.create_task(embedder.embed("b"))
        embedder.gate.set()
        assert await again == b"b"


async def test_too_many_that_wait_are_refused() -> None:
    async with Gated(waiting=1) as embedder:
        tasks = await begun(embedder, "a", "b")
        with pytest.raises(Busy):
            await embedder.embed("c")
        embedder.gate.set()
        await asyncio.gather(*tasks)
        assert await embedder.embed("c") == b"c"


async def test_closing_ends_all_waits() -> None:
    async with Gated() as embedder:
        tasks = await begun(embedder, "a", "b")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EmbedderError, EmbedderError]
    with pytest.raises(EmbedderError, match="not open"):
        await embedder.embed("c")
