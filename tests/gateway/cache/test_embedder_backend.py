"""Vectors from a server: what is asked, and what is not believed."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.backends.transport import Transport
from gateway.cache.backend_embedder import BackendEmbedder
from gateway.cache.embedder import EmbedderError, TooLong

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@asynccontextmanager
async def serving(answer: Answer, **settings: Any) -> AsyncIterator[tuple[BackendEmbedder, list[dict[str, Any]]]]:
    """An embedder, and what its server was asked; heads count as ``head``."""
    asked: list[dict[str, Any]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                fields = json.loads(await reader.readexactly(length))
                asked.append(fields | {"head": head.decode().lower()})
                status, told = answer(fields)
                body = told if isinstance(told, bytes) else json.dumps(told).encode()
                writer.write(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
    async with (
        server,
        Transport() as transport,
        BackendEmbedder(transport, url, "model-e", 2, **settings) as embedder,
    ):
        yield embedder, asked


def vectors(fields: dict[str, Any]) -> tuple[int, Any]:
    """Each text's length, and 4; in the wrong order, but numbered."""
    data = [{"embedding": [len(text), 4], "index": at} for at, text in enumerate(fields["input"])]
    return 200, {"data": data[::-1]}


def unpacked(vector: bytes) -> list[float]:
    return [round(value, 4) for value in struct.unpack("=2f", vector)]


async def test_asks_as_the_api_has_it_and_makes_lengths_one() -> None:
    async with serving(vectors, api_key="secret") as (embedder, asked):
        assert unpacked(await embedder.embed("abc")) == [0.6, 0.8]
        assert (embedder.name, embedder.dimensions) == ("model-e", 2)
    (only,) = asked
    assert (only["model"], only["input"], only["encoding_format"]) == ("model-e", ["abc"], "float")
    assert only["head"].startswith("post /v1/embeddings ")
    assert "authorization: bearer secret\r\n" in only["head"]


async def test_texts_that_wait_go_together_and_get_their_own_vectors() -> None:
    async with serving(vectors, at_a_time=1) as (embedder, asked):
        texts = ["abc", "", "abcd"]
        made = await asyncio.gather(*map(embedder.embed, texts))
        assert [unpacked(vector) for vector in made] == [[0.6, 0.8], [0.0, 1.0], [0.7071, 0.7071]]
        assert [fields["input"] for fields in asked] == [texts]


async def test_a_text_that_is_refused_costs_others_nothing() -> None:
    def choosy(fields: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {}}) if "long" in fields["input"] else vectors(fields)

    async with serving(choosy, at_a_time=1) as (embedder, _):
        made = await asyncio.gather(*map(embedder.embed, ["abc", "long", "abcd"]), return_exceptions=True)
        assert [type(vector) for vector in made] == [bytes, TooLong, bytes]


@pytest.mark.parametrize(
    ("status", "told", "says"),
    [
        (401, {"error": {"message": "bad key secret"}}, "answered 401"),
        (500, b"", "answered 500"),
        (200, b"<html>", "no list of embeddings"),
        (200, {"data": []}, "other texts"),
        (200, {"data": [{"embedding": [1, 0], "index": 7}]}, "other texts"),
        (200, {"data": [{"embedding": [1, 0, 0], "index": 0}]}, "makes 3 dimensions, not 2"),
        (200, {"data": [{"embedding": [0, 0], "index": 0}]}, "without a direction"),
        (200, {"data": [{"embedding": [1e300, 1e300], "index": 0}]}, "without a direction"),
    ],
)
async def test_what_is_no_vector_is_a_fault_that_says_why(status: int, told: Any, says: str) -> None:
    async with serving(lambda _: (status, told)) as (embedder, _):
        with pytest.raises(EmbedderError, match=says) as fault:
            await embedder.embed("abc")
        assert "secret" not in str(fault.value)


async def test_no_server_is_a_fault() -> None:
    async with Transport() as transport, BackendEmbedder(transport, "http://127.0.0.1:1/v1", "m", 2) as embedder:
        with pytest.raises(EmbedderError, match="did not answer"):
            await embedder.embed("abc")
