"""The Responses door by the official SDK, over real sockets, Postgres and Redis; only the worker is scripted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.http.openai.responses_support import (
    PATH,
    WEATHER,
    calling,
    chunk,
    saying,
    sdk_of,
)


async def test_whole_and_streamed_say_the_same(gateway: Any, upstream: Any) -> None:
    server = await upstream(saying("Par", "is", " — 巴黎"))
    await gateway.register(server)
    asked: dict[str, Any] = {
        "model": "m",
        "input": "Capital of France?",
        "instructions": "Be brief.",
        "temperature": 0,
        "max_output_tokens": 20,
        "metadata": {"trip": "7"},
        "user": "ann",
        "extra_body": {"top_k": 5},
    }
    async with sdk_of(gateway) as sdk:
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}) as client:
        wire = await client.post(PATH, json={"model": "m", "input": "Hello", "stream": True})
    assert wire.headers["content-type"] == "text/event-stream"
    *frames, rest = wire.text.split("\n\n")
    assert (len(frames), rest) == (len(events), "")
    for frame in frames:
        name, data = frame.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert whole.output_text == streamed.output_text == "Paris — 巴黎"
    assert whole.id.startswith("resp_")
    assert (whole.status, whole.model, whole.object) == ("completed", "m", "response")
    assert (whole.instructions, whole.temperature, whole.metadata) == ("Be brief.", 0, {"trip": "7"})
    assert (whole.max_output_tokens, whole.user, whole.store, whole.error) == (20, "ann", True, None)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (9, 4, 13)
    assert whole.usage.input_tokens_details.cached_tokens == 5
    assert whole.usage.output_tokens_details.reasoning_tokens == 1
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert without_ids(streamed.to_dict()) == without_ids(whole.to_dict())
    first, second, _ = (conversation.body for conversation in server.seen)
    assert first == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Capital of France?"},
        ],
        "temperature": 0,
        "max_tokens": 20,
        "user": "ann",
        "top_k": 5,
    }
    assert second == first | {"stream": True, "stream_options": {"include_usage": True}}
    rows = await gateway.rows(3)
    assert [(row.api, row.status, row.prompt_tokens, row.completion_tokens) for row in rows] == [
        ("responses", "ok", 9, 3),
        ("responses", "ok", 9, 4),
        ("responses", "ok", 9, 4),
    ]
    assert rows[0].end_user is not None
    assert whole.id == f"resp_{rows[0].request_id.hex}"


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what tells two of the same kind apart."""
    for item in response["output"]:
        item["id"] = ""
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return response | {"id": "", "created_at": 0, "completed_at": 0}


async def test_tools_go_round_by_previous_response_id(gateway: Any, upstream: Any) -> None:
    server = await upstream(calling, calling, saying("Rome is warmer."))
    await gateway.register(server)
    asked: dict[str, Any] = {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Rome or Oslo?"}]}],
        "instructions": "Use tools.",
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": True,
    }
    async with sdk_of(gateway) as sdk:
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            first = await stream.get_final_response()
        assert without_ids(first.to_dict()) == without_ids(whole.to_dict())
        reasoning, message, *calls = first.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Two towns."
        assert message.type == "message"
        assert first.output_text == "Looking."
        assert [(call.name, call.call_id, call.arguments) for call in calls if call.type == "function_call"] == [
            ("weather", "call_0", '{"town": "Rome"}'),
            ("weather", "call_1", '{"town": "Oslo"}'),
        ]
        outputs: Any = [
            {"type": "function_call_output", "call_id": "call_0", "output": "warm"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "cold"}]},
        ]
        second = await sdk.responses.create(model="m", previous_response_id=first.id, input=outputs)
        assert second.output_text == "Rome is warmer."
        assert (second.previous_response_id, second.instructions) == (first.id, None)
        assert await sdk.responses.retrieve(second.id) == second
        listed = [item async for item in await sdk.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.type for item in listed] == [
            *("message", "reasoning", "message", "function_call", "function_call"),
            *("function_call_output", "function_call_output"),
        ]
        assert len({item.id for item in listed}) == len(listed)
        newest = await sdk.responses.input_items.list(second.id, limit=1)
        assert (newest.has_more, newest.data[0].type) == (True, "function_call_output")
        with pytest.raises(openai.BadRequestError, match="No tool output found"):
            await sdk.responses.create(model="m", previous_response_id=first.id, input="And Bonn?")
    sent = server.seen[0].body
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert server.seen[2].body["messages"] == [
        {"role": "user", "content": "Rome or Oslo?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}},
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "warm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    ]


class Town(BaseModel):
    name: str
    people: int


async def test_structured_output_media_and_an_answer_cut_short(gateway: Any, upstream: Any) -> None:
    bonn = saying('{"name":"Bonn",', '"people":330000}')
    server = await upstream(bonn, bonn, saying("Once upon", finish="length"))
    await gateway.register(server)
    # Long enough to be translated beside the event loop.
    picture = "data:image/png;base64," + "A" * 300_000
    asked: Any = {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Which town?"},
            {"type": "input_image", "image_url": picture, "detail": "low"},
            {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"},
        ],
    }
    async with sdk_of(gateway) as sdk:
        whole = await sdk.responses.parse(model="m", input=[asked], text_format=Town)
        async with sdk.responses.stream(model="m", input=[asked], text_format=Town) as stream:
            streamed = await stream.get_final_response()
    assert whole.output_parsed == streamed.output_parsed == Town(name="Bonn", people=330000)
    sent = server.seen[0].body
    assert sent["response_format"]["type"] == "json_schema"
    assert sent["response_format"]["json_schema"]["name"] == "Town"
    assert sent["response_format"]["json_schema"]["strict"] is True
    assert sent["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Which town?"},
                {"type": "image_url", "image_url": {"url": picture, "detail": "low"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
            ],
        }
    ]
    async with sdk_of(gateway) as sdk:
        whole = await sdk.responses.create(model="m", input="A tale", max_output_tokens=2)
        events = [event async for event in await sdk.responses.create(model="m", input="A tale", stream=True)]
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        last = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.output_text == "Once upon"
        assert (await sdk.responses.retrieve(whole.id)).status == "incomplete"


async def test_faults_raise_the_right_exceptions(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.event(chunk(content="Par"))

    async def refused(c: Any) -> None:
        await c.status(400, b'{"error":{"message":"too hot","type":"invalid_request_error","param":null,"code":null}}')

    async def broken(c: Any) -> None:
        await c.begin()
        await c.event(chunk(content="Par"))
        await c.event(b'{"error":{"message":"no luck","type":"server_error","code":"unlucky"}}')

    async def nonsense(c: Any) -> None:
        await c.begin()
        await c.event(b'{"choices":[{"index":0,"delta":{"content":5}}]}')
        await c.done()

    await gateway.register(await upstream(cut, broken, refused, nonsense, saying("Paris")))
    async with sdk_of(gateway) as sdk:
        seen: list[str] = []

        async def read() -> None:
            async for event in await sdk.responses.create(model="m", input="a", stream=True):
                seen.append(event.type)

        with pytest.raises(openai.APIError, match="broke off") as raised:
            await read()
        assert (raised.value.code, raised.value.type) == ("backend_disconnected", "server_error")
        assert seen[-1] == "response.output_text.delta"
        async with sdk.responses.stream(model="m", input="a") as stream:
            with pytest.raises(openai.APIError, match="no luck"):
                await stream.get_final_response()
        with pytest.raises(openai.BadRequestError, match="too hot"):
            await sdk.responses.create(model="m", input="a", temperature=9)
        with pytest.raises(openai.InternalServerError, match="cannot be read"):
            await sdk.responses.create(model="m", input="a")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await sdk.responses.create(model="other", input="a")
        with pytest.raises(openai.NotFoundError, match="not found"):
            await sdk.responses.retrieve("resp_" + "0" * 32)
        good = await sdk.responses.create(model="m", input="a")
        with pytest.raises(openai.BadRequestError, match="background"):
            await sdk.responses.cancel(good.id)
        with pytest.raises(openai.BadRequestError, match="not streamed again"):
            await sdk.responses.retrieve(good.id, stream=True)
        refused: list[tuple[str, dict[str, Any]]] = [
            ("background", {"background": True}),
            ("conversation", {"conversation": "conv_1"}),
            ("prompt", {"prompt": {"id": "pmpt_1"}}),
            ("tools[0].type", {"tools": [{"type": "web_search"}]}),
            ("max_tokens", {"extra_body": {"max_tokens": 5}}),
            ("n", {"extra_body": {"n": 5}}),
            ("max_output_tokens", {"max_output_tokens": 501}),
            ("previous_response_id", {"previous_response_id": "resp_1"}),
            ("include", {"include": ["everything"]}),
        ]
        for field, more in refused:
            with pytest.raises(openai.BadRequestError) as wrong:
                await sdk.responses.create(**{"model": "m", "input": "a"} | more)
            assert wrong.value.param == field
    async with sdk_of(gateway, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(model="m", input="a")
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.retrieve(good.id)
    rows = await gateway.rows(5)
    assert [row.status for row in rows] == ["failed", "failed", "failed", "failed", "ok"]
