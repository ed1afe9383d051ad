"""Tool calls as servers send them and no reference has them: clients of every door get each call, whole and once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from gateway.settings import Settings
from tests.e2e.conformance import hostile_backend as says
from tests.e2e.conformance.hostile_backend import DONE, ROLE, USAGE, Script, answers, streams
from tests.e2e.conformance.targets import Clients, Declared, clients_of, declare
from tests.gateway.conftest import Conversation, Upstream, running_gateway

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

QUESTION: Final[Any] = {"role": "user", "content": "Weather?"}
ROME, OSLO = {"city": "Rome"}, {"city": "Oslo"}
TOOL: Final[Any] = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}},
}


def call(arguments: Any = "", name: str | None = None, **more: Any) -> dict[str, Any]:
    return more | {"function": {"arguments": arguments} | ({} if name is None else {"name": name})}


def stream(*deltas: dict[str, Any], finish: str = "tool_calls") -> Script:
    chunks = [says.chunk({"tool_calls": [delta]}) for delta in deltas]
    return streams(ROLE, *chunks, says.chunk({}, finish), USAGE, DONE)


HEADS: Final = (call("", "weather", index=0, id="a"), call("", "weather", index=1, id="b"))
STREAMS: Final[dict[str, Script]] = {
    "as-they-should": stream(
        HEADS[0], call('{"city": "', index=0), call('Rome"}', index=0), HEADS[1], call('{"city": "Oslo"}', index=1)
    ),
    "in-turn": stream(
        *HEADS,
        call('{"city"', index=0),
        call('{"city"', index=1),
        call(': "Rome"}', index=0),
        call(': "Oslo"}', index=1),
    ),
    "without-indexes": stream(
        call("", "weather", id="a"), call('{"city": "Rome"}'), call('{"city": "Oslo"}', "weather", id="b")
    ),
    "all-of-one-index": stream(
        call('{"city": "Rome"}', "weather", index=0, id="a"), call('{"city": "Oslo"}', "weather", index=0, id="b")
    ),
    "with-an-id-each-time": stream(
        HEADS[0],
        call('{"city": "', index=0, id="x"),
        call('Rome"}', index=0, id="y"),
        HEADS[1],
        call('{"city": "Oslo"}', index=1),
    ),
    "with-nulls": stream(
        HEADS[0],
        {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '{"city": "Rome"}'}},
        {"index": 0, "function": {"arguments": None}},
        HEADS[1],
        call('{"city": "Oslo"}', index=1),
    ),
    "at-once": streams(
        ROLE,
        says.chunk(
            {
                "tool_calls": [
                    call('{"city": "Rome"}', "weather", index=0, id="a"),
                    call('{"city": "Oslo"}', "weather", index=1, id="b"),
                ]
            }
        ),
        says.chunk({}, "stop"),
        USAGE,
        DONE,
    ),
    "with-the-reason": streams(
        ROLE,
        says.chunk(
            {
                "tool_calls": [
                    call('{"city": "Rome"}', "weather", index=0, id="a"),
                    call('{"city": "Oslo"}', "weather", index=1, id="b"),
                ]
            },
            "stop",
        ),
        USAGE,
        DONE,
    ),
    "without-ids": stream(
        call('{"city": "Rome"}', "weather", index=0), call('{"city": "Oslo"}', "weather", index=1, id="")
    ),
    "from-one-on": stream(
        call('{"city": "Rome"}', "weather", index=1, id="a"), call('{"city": "Oslo"}', "weather", index=2, id="b")
    ),
}


def whole(*calls: dict[str, Any], finish: str = "tool_calls") -> Script:
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"} | each for each in calls]}
    return answers(200, says.completion(choices=[{"index": 0, "message": message, "finish_reason": finish}]))


TO_ROME, TO_OSLO = call('{"city": "Rome"}', "weather"), call('{"city": "Oslo"}', "weather")
WHOLES: Final[dict[str, Script]] = {
    "whole": whole(TO_ROME | {"id": "a"}, TO_OSLO | {"id": "b"}),
    "whole-that-stops": whole(TO_ROME | {"id": "a"}, TO_OSLO | {"id": "b"}, finish="stop"),
    "whole-without-ids": whole(TO_ROME, TO_OSLO | {"id": ""}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(gateway_settings: Settings) -> AsyncIterator[Clients]:
    async def converse(c: Conversation) -> None:
        await (STREAMS | WHOLES)[c.head.split("/")[1]](c, says.Heard())

    upstream = Upstream([converse])
    await upstream.start()
    await declare(
        gateway_settings.database_url, [Declared(name, "vllm", f"{upstream.url}/{name}") for name in STREAMS | WHOLES]
    )
    async with running_gateway(gateway_settings) as gateway, clients_of(gateway.url, gateway.key) as clients:
        yield clients
    await upstream.stop()
    assert upstream.failures == []


EITHER = pytest.mark.parametrize("name", [*STREAMS, *WHOLES])


@EITHER
async def test_chat(clients: Clients, name: str) -> None:
    chats, ask = clients.openai.chat.completions, {"model": name, "messages": [QUESTION], "tools": [TOOL]}
    if name in WHOLES:
        final: Any = await chats.create(**ask)
    else:
        async with chats.stream(**ask) as events:
            final = await events.get_final_completion()
    calls = final.choices[0].message.tool_calls or ()
    check(name, [(each.id, each.function.name, json.loads(each.function.arguments)) for each in calls])


@EITHER
async def test_responses(clients: Clients, name: str) -> None:
    tool: Any = {"type": "function"} | TOOL["function"]
    ask: Any = {"model": name, "input": "Weather?", "tools": [tool], "store": False}
    if name in WHOLES:
        final: Any = await clients.openai.responses.create(**ask)
    else:
        async with clients.openai.responses.stream(**ask) as events:
            final = await events.get_final_response()
    items = [item for item in final.output if item.type == "function_call"]
    check(name, [(item.call_id, item.name, json.loads(item.arguments)) for item in items])


@EITHER
async def test_messages(clients: Clients, name: str) -> None:
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}}
    ask: Any = {"model": name, "max_tokens": 20, "messages": [QUESTION], "tools": [tool]}
    if name in WHOLES:
        final: Any = await clients.anthropic.messages.create(**ask)
    else:
        async with clients.anthropic.messages.stream(**ask) as events:
            final = await events.get_final_message()
    assert final.stop_reason == "tool_use"
    check(name, [(block.id, block.name, block.input) for block in final.content if block.type == "tool_use"])


def check(name: str, found: list[tuple[str, str, Any]]) -> None:
    assert [(called, arguments) for _, called, arguments in found] == [("weather", ROME), ("weather", OSLO)]
    ids = [id for id, _, _ in found]
    if "without-ids" not in name:
        assert ids == ["a", "b"]
    else:
        assert all(ids)
        assert len(set(ids)) == 2
