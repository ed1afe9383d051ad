"""An answer that is kept before its last event leaves, or says that it was not."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import msgspec
import pytest

from gateway.responses.keeping import KeptAnswer
from worker.protocol.errors import ApiError, server_error

OWN = "resp_own"
DELTA = b'{"type":"response.output_text.delta","delta":"a"}'


def response(response_id: str = OWN) -> dict[str, Any]:
    return {"id": response_id, "store": True, "output": [1.50, "\u2028"]}


def last(response_id: str = OWN) -> bytes:
    event = {"type": "response.completed", "sequence_number": 3, "response": response(response_id)}
    return json.dumps(event, separators=(",", ":")).encode()


class Scripted:
    """An answer in batches of events, the last of which may be a fault."""

    def __init__(self, *batches: list[bytes] | ApiError, streamed: bool = True) -> None:
        self.batches = list(batches)
        self.streamed = streamed
        self.timeout_s = 7.0
        self.client_left = False
        self.complete = False
        self.entered = 0

    def left(self) -> None:
        self.client_left = True

    def headers(self) -> list[tuple[str, str]]:
        return [("a", "b")]

    async def events(self) -> list[bytes]:
        batch = self.batches.pop(0)
        if isinstance(batch, ApiError):
            raise batch
        self.complete = not self.batches
        return batch

    async def whole(self) -> bytes:
        return (await self.events())[0]

    async def __aenter__(self) -> Scripted:
        self.entered += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered -= 1


class Keeper:
    def __init__(self, *, able: bool = True) -> None:
        self.able = able
        self.kept: list[Any] = []

    async def keep(self, raw: msgspec.Raw) -> bool:
        self.kept.append(msgspec.json.decode(raw))
        return self.able


async def delivered(answer: Scripted, keeper: Keeper) -> list[tuple[list[bytes], bool, int]]:
    """Each batch, whether it was the last, and how many were kept when it left."""
    batches = []
    async with KeptAnswer(answer, OWN, keeper.keep) as kept:
        assert answer.entered == 1
        assert (kept.streamed, kept.timeout_s, kept.headers()) == (True, 7.0, [("a", "b")])
        kept.left()
        assert kept.client_left
        while not kept.complete:
            events = await kept.events()
            batches.append((events, kept.complete, len(keeper.kept)))
    assert answer.entered == 0
    return batches


async def test_the_last_event_alone_waits_until_it_is_kept() -> None:
    keeper = Keeper()
    found = await delivered(Scripted([DELTA], [], [DELTA, DELTA, last()]), keeper)
    assert found == [([DELTA], False, 0), ([], False, 0), ([DELTA, DELTA], False, 0), ([last()], True, 1)]
    assert keeper.kept == [response()]
    alone = await delivered(Scripted([DELTA], [last()]), Keeper())
    assert alone == [([DELTA], False, 0), ([last()], True, 1)]


async def test_what_is_not_kept_says_so_and_is_otherwise_the_same() -> None:
    ((event,), _, _) = (await delivered(Scripted([last()]), Keeper(able=False)))[-1]
    assert event == last().replace(b'"store":true', b'"store":false')
    whole = Scripted([json.dumps(response()).encode()], streamed=False)
    told = await KeptAnswer(whole, OWN, Keeper(able=False).keep).whole()
    assert json.loads(told) == response() | {"store": False}


async def test_a_replay_and_a_broken_answer_are_not_kept() -> None:
    keeper = Keeper()
    assert (await delivered(Scripted([DELTA, last("resp_first")]), keeper))[-1] == ([last("resp_first")], True, 0)
    assert (await delivered(Scripted([DELTA], []), keeper))[-1] == ([], True, 0)
    body = json.dumps(response("resp_first")).encode()
    assert await KeptAnswer(Scripted([body]), OWN, keeper.keep).whole() == body
    with pytest.raises(ApiError):
        await delivered(Scripted([DELTA], server_error("broke off")), keeper)
    assert keeper.kept == []
