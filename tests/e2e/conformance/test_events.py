"""What a backend sends is what its clients get: each event, byte for byte, but for what the rules change.

These are the model's name and, where the client did not ask for it, the chunk that tells usage alone; and tool calls
get the index that Google's lack.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conformance.targets import BACKEND_MODEL, STANDINS, House
from tests.standins.base import StandIn

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

DONE = b"[DONE]"
OPENAIS = [name for name in STANDINS if name != "anthropic"]
APART = [name for name in OPENAIS if name not in ("google", "llamacpp_of_old")]
"""Those that tell usage in a chunk of its own."""


async def told(house: House, path: str, body: dict[str, Any]) -> list[tuple[bytes | None, bytes]]:
    """Name and data of each event, from the raw bytes."""
    answer = await house.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.content.endswith(b"\n\n")
    events = []
    for frame in answer.content.removesuffix(b"\n\n").split(b"\n\n"):
        lines = frame.split(b"\n")
        name = lines.pop(0).removeprefix(b"event: ") if lines[0].startswith(b"event: ") else None
        (data,) = lines
        assert data.startswith(b"data: ")
        events.append((name, data.removeprefix(b"data: ")))
    return events


def sent(standin: StandIn, model: str) -> list[bytes]:
    """Data of the events that it sent last, under the name that clients call the model by."""
    theirs, ours = b"claude-sonnet-4-6" if model == "anthropic" else BACKEND_MODEL.encode(), model.encode()
    events = [data.replace(b'"%b"' % theirs, b'"%b"' % ours) for data in standin.sent[-1].events]
    if model == "google":
        bare = b'"tool_calls":[{"extra_content"'
        calls = [place for place, data in enumerate(events) if bare in data]
        for index, place in enumerate(calls):
            events[place] = events[place].replace(bare, b'"tool_calls":[{"index":%d,"extra_content"' % index)
    return events


def tells_usage_alone(data: bytes) -> bool:
    return data != DONE and not json.loads(data)["choices"]


def question(scenario: str) -> Any:
    return [{"role": "user", "content": f"[[{scenario}]]"}]


@pytest.mark.parametrize("name", OPENAIS)
async def test_chats_and_completions(standins: House, name: str) -> None:
    standin = standins.standins[name]
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": question(scenario), "n": 2 if scenario == "tools" else 1})
        for scenario in ("text", "tools", "reasoning", "running_usage", "keep_alive")
    ]
    asks += [("/v1/completions", {"prompt": "Say it."})] if standin.completions_served else []  # type: ignore[attr-defined]
    for path, ask in asks:
        for wanted in (True, False, None):
            body = {"model": name} | ask
            if wanted is not None:
                body["stream_options"] = {"include_usage": wanted}
            found = await told(standins, path, body)
            events = sent(standin, name)
            assert standin.seen[-1].body["model"] == BACKEND_MODEL
            alone = [data for data in events if tells_usage_alone(data)]
            assert len(alone) == (name in APART)
            expected = [data for data in events if data not in alone]
            assert expected.pop() == DONE
            assert found == [(None, data) for data in (*expected, *(alone if wanted else []), DONE)]


async def test_messages(standins: House) -> None:
    standin = standins.standins["anthropic"]
    for scenario in ("text", "tools", "reasoning", "keep_alive"):
        found = await told(
            standins, "/v1/messages", {"model": "anthropic", "max_tokens": 20, "messages": question(scenario)}
        )
        assert [data for _, data in found] == sent(standin, "anthropic")
        assert all(name == json.loads(data)["type"].encode() for name, data in found)


@pytest.mark.parametrize("name", STANDINS)
async def test_the_sdk_reads_each_field_as_it_was_sent(standins: House, name: str) -> None:
    """Also those that it does not know."""
    target = standins.target(name)
    for scenario in ("text", "tools", "reasoning"):
        if name == "anthropic":
            stream: Any = await target.clients.anthropic.messages.create(
                model=name,
                max_tokens=20,
                messages=question(scenario),
                stream=True,
            )
        else:
            stream = await target.clients.openai.chat.completions.create(
                model=name,
                messages=question(scenario),
                stream=True,
                stream_options={"include_usage": True},
            )
        found = [event.to_dict(mode="json") async for event in stream]
        events = [json.loads(data) for data in sent(standins.standins[name], name) if data != DONE]
        assert found == [event for event in events if event.get("type") != "ping"]
