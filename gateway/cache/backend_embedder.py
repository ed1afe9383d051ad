"""Vectors from any server of OpenAI's ``/v1/embeddings``: for languages or lengths that the model in process lacks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Final

import msgspec

from gateway.backends.faults import BackendFault
from gateway.backends.transport import Transport
from gateway.cache.embedder import BatchingEmbedder, EmbedderError, TooLong

CONNECT_S: Final = 2.0
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of an answer; a longer one is not read."""


class _Vector(msgspec.Struct, frozen=True):
    embedding: list[float]
    index: int | None = None


class _Vectors(msgspec.Struct, frozen=True):
    data: list[_Vector]


class BackendEmbedder(BatchingEmbedder):
    """Open ``transport`` for as long as this is."""

    def __init__(
        self,
        transport: Transport,
        base_url: str,
        model: str,
        dimensions: int,
        *,
        api_key: str | None = None,
        batch: int = 32,
        at_a_time: int = 4,
    ) -> None:
        """``base_url`` ends before ``/embeddings``, as ``https://host/v1`` does; ``dimensions`` are the model's."""
        super().__init__(batch=batch, at_a_time=at_a_time, waiting=512, remembered=4096)
        self.name = model
        self.dimensions = dimensions
        self._transport = transport
        self._url = f"{base_url.rstrip('/')}/embeddings"
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def embed_batch(self, texts: Sequence[str]) -> Sequence[bytes | EmbedderError]:
        body = msgspec.json.encode({"model": self.name, "input": list(texts), "encoding_format": "float"})
        try:
            reply = await self._transport.post(self._url, headers=self._headers, body=body, connect_s=CONNECT_S)
        except BackendFault as fault:
            raise EmbedderError(f"the server of embeddings did not answer ({fault.code})") from fault
        try:
            whole = await reply.read_limited(MOST_BYTES)
        except BackendFault as fault:
            raise EmbedderError(f"the server of embeddings broke off ({fault.code})") from fault
        finally:
            reply.close()
        if reply.status in (400, 413, 422):
            return await self._one_by_one(texts, reply.status)
        if reply.status != 200 or whole is None:
            raise EmbedderError(f"the server of embeddings answered {reply.status}: check its URL, key and model")
        return self._vectors(whole, len(texts))

    async def _one_by_one(self, texts: Sequence[str], status: int) -> Sequence[bytes | EmbedderError]:
        """One text that the model cannot take must not cost the others their vectors."""
        if len(texts) == 1:
            return [TooLong(f"the server of embeddings refused the text ({status})")]
        return [vector for text in texts for vector in await self.embed_batch([text])]

    def _vectors(self, body: bytes, count: int) -> Sequence[bytes | EmbedderError]:
        try:
            data = msgspec.json.decode(body, type=_Vectors).data
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise EmbedderError("the server of embeddings sent what is no list of embeddings") from fault
        ordered = {at if vector.index is None else vector.index: vector.embedding for at, vector in enumerate(data)}
        if sorted(ordered) != list(range(count)):
            raise EmbedderError("the server of embeddings sent vectors for other texts than asked")
        return [self._packed(ordered[at]) for at in range(count)]

    def _packed(self, values: Sequence[float]) -> bytes | EmbedderError:
        if len(values) != self.dimensions:
            return EmbedderError(
                f"{self.name} makes {len(values)} dimensions, not {self.dimensions}: correct the settings"
            )
        length = sqrt(sum(value * value for value in values))
        if not isfinite(length) or length == 0:
            return EmbedderError("the server of embeddings sent a vector without a direction")
        return struct.pack(f"={len(values)}f", *(value / length for value in values))
