"""An answer that is kept on its way to the client, before its last event leaves: a request that follows finds it.

Only an answer that came to its good end is kept, and only by the request that made it: a replay for an idempotency key
keeps nothing, and so does not bring back what was deleted meanwhile. What cannot be kept is delivered all the same, and
says ``"store": false``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec

from gateway.answerable import Answerable

Keep = Callable[[msgspec.Raw], Awaitable[bool]]
"""Keeps a response; whether it was."""
_FALSE = msgspec.Raw(b"false")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_id_decoder = msgspec.json.Decoder(str)


class KeptAnswer:
    def __init__(self, answer: Answerable, response_id: str, keep: Keep) -> None:
        """``response_id``: by which the request's own answer is known."""
        self._answer = answer
        self._response_id = response_id
        self._keep = keep
        self._last: bytes | None = None
        self.complete = False

    @property
    def streamed(self) -> bool:
        return self._answer.streamed

    @property
    def timeout_s(self) -> float:
        return self._answer.timeout_s

    @property
    def client_left(self) -> bool:
        return self._answer.client_left

    def left(self) -> None:
        self._answer.left()

    def headers(self) -> list[tuple[str, str]]:
        return self._answer.headers()

    async def events(self) -> list[bytes]:
        """The last event is held back until the response is kept; those before it do not wait for that."""
        if self._last is not None:
            last, self._last = self._last, None
            self.complete = True
            return [await self._kept_event(last)]
        found = await self._answer.events()
        if not self._answer.complete:
            return found
        if not found:
            self.complete = True
            return found
        *before, last = found
        if before:
            self._last = last
            return before
        self.complete = True
        return [await self._kept_event(last)]

    async def whole(self) -> bytes:
        body = await self._answer.whole()
        return bytes(await self._kept(msgspec.Raw(body)))

    async def _kept_event(self, data: bytes) -> bytes:
        event = _decoder.decode(data)
        kept = await self._kept(event["response"])
        return data if kept is event["response"] else msgspec.json.encode(event | {"response": kept})

    async def _kept(self, response: msgspec.Raw) -> msgspec.Raw:
        fields = _decoder.decode(response)
        if _id_decoder.decode(fields["id"]) != self._response_id or await self._keep(response):
            return response
        return msgspec.Raw(msgspec.json.encode(fields | {"store": _FALSE}))

    async def __aenter__(self) -> KeptAnswer:
        await self._answer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._answer.__aexit__(kind, fault, trace)
