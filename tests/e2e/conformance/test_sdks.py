"""The official SDKs, blocking and awaited, streamed and whole, before our worker and a stand-in of each brand.

Our worker's small model is forced to call by ``tool_choice``; what it says is only held to be the same each time. It
takes its time, so not all is asked of it twice; ``tests/e2e/test_engine_features.py`` streams a chat's call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.conformance.targets import STANDINS, House, Target, Way
from tests.standins.base import CALLS, PROMPT_TOKENS, TEXT

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}

SHORT: Any = 16
"""Tokens that hold an answer of few words."""


class GetWeather(pydantic.BaseModel):
    """Tells the weather of a city."""

    city: Literal["Zürich", "Paris"]


class GetTime(pydantic.BaseModel):
    """Tells the time of a zone."""

    zone: Literal["CET", "UTC"]


TOOLS: Any = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(GetTime, name="get_time"),
]
RESPONSE_TOOLS: Any = [{"type": "function"} | tool["function"] for tool in TOOLS]
MESSAGE_TOOLS: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]
EXPECTED_CALLS = [(call.id, call.name, json.loads("".join(call.arguments))) for call in CALLS]


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "worker":
        worker: Target = request.getfixturevalue("worker")
        return worker
    house: House = request.getfixturevalue("standins")
    return house.target(request.param)


@pytest.fixture
def way(request: pytest.FixtureRequest, target: Target) -> Way:
    return Way(target.clients, blocking=request.param == "blocking")


def before_all(*, worker: Sequence[str] = ("blocking", "awaited")) -> pytest.MarkDecorator:
    """Each target in both ways; our worker, which takes its time, in those."""
    pairs = [("worker", way) for way in worker]
    pairs += [(name, way) for name in STANDINS for way in ("blocking", "awaited")]
    return pytest.mark.parametrize(("target", "way"), pairs, indirect=True)


def check_text(target: Target, text: str | None) -> None:
    assert text
    assert target.standin is None or text == TEXT


def check_calls(target: Target, calls: Sequence[tuple[str, str, Any]]) -> None:
    """Id, name and arguments of each."""
    assert calls
    for _, name, arguments in calls:
        {"get_weather": GetWeather, "get_time": GetTime}[name].model_validate(arguments)
    assert target.standin is None or list(calls) == EXPECTED_CALLS


def chat_calls(message: Any) -> list[tuple[str, str, Any]]:
    return [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@before_all()
async def test_chat_completions(target: Target, way: Way) -> None:
    chats = way.openai.chat.completions
    ask = {"model": target.model, "messages": [QUESTION], "temperature": 0, "max_tokens": SHORT}
    whole = await way.get(chats.create, **ask)
    text = whole.choices[0].message.content
    check_text(target, text)
    assert whole.model == target.model
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = await way.listed(chats.create, **ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert {chunk.model for chunk in chunks} == {target.model}
    events, final = await way.helped(
        chats.stream, "get_final_completion", **ask, stream_options={"include_usage": True}
    )
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert final.choices[0].message.content == text
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@before_all(worker=("awaited",))
async def test_chat_completions_with_tools(target: Target, way: Way) -> None:
    chats = way.openai.chat.completions
    ask = {"model": target.model, "temperature": 0, "max_tokens": 80, "tools": TOOLS, "parallel_tool_calls": False}
    whole = await way.get(chats.parse, **ask, messages=[QUESTION], tool_choice="required")
    message = whole.choices[0].message
    calls = chat_calls(message)
    check_calls(target, calls)
    assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather | GetTime)

    if target.standin is not None:
        _, final = await way.helped(
            chats.stream, "get_final_completion", **ask, messages=[QUESTION], tool_choice="required"
        )
        assert chat_calls(final.choices[0].message) == calls

    said = message.to_dict()
    said.pop("parsed", None)
    results = [{"role": "tool", "tool_call_id": id, "content": "It is fine."} for id, _, _ in calls]
    answer = await way.get(
        chats.create, **ask | {"max_tokens": SHORT}, messages=[QUESTION, said, *results], tool_choice="none"
    )
    check_text(target, answer.choices[0].message.content)


@before_all(worker=("awaited",))
async def test_completions_embeddings_and_models(target: Target, way: Way) -> None:
    sdk = way.openai
    ask = {"model": target.model, "prompt": "One, two,", "temperature": 0, "max_tokens": SHORT}
    if target.brand in ("google", "anthropic"):
        with pytest.raises(openai.APIStatusError):
            await way.get(sdk.completions.create, **ask)
    else:
        whole = await way.get(sdk.completions.create, **ask)
        check_text(target, whole.choices[0].text)
        chunks = await way.listed(sdk.completions.create, **ask, stream=True, stream_options={"include_usage": True})
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        assert {chunk.model for chunk in chunks} == {target.model}
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    if target.brand in ("trtllm", "anthropic"):
        with pytest.raises(openai.APIStatusError):
            await way.get(sdk.embeddings.create, model=target.model, input=["a", "b"])
    else:
        vectors = await way.get(sdk.embeddings.create, model=target.model, input=["a", "b"], encoding_format="float")
        assert [each.index for each in vectors.data] == [0, 1]
        assert all(isinstance(each.embedding[0], float) for each in vectors.data)
        assert vectors.usage.prompt_tokens > 0
    assert target.model in [model.id for model in await way.listed(sdk.models.list)]
    assert (await way.get(sdk.models.retrieve, target.model)).id == target.model


@before_all(worker=("awaited",))
async def test_responses(target: Target, way: Way) -> None:
    responses = way.openai.responses
    ask = {"model": target.model, "temperature": 0, "max_output_tokens": SHORT}
    question = {"input": "What is the capital of France?", "instructions": "Be short."}
    first = await way.get(responses.create, **ask, **question)
    check_text(target, first.output_text)
    assert (first.model, first.object, first.error) == (target.model, "response", None)
    ending = "completed" if first.status == "completed" else "incomplete"
    assert ending == "completed" or target.standin is None

    events = await way.listed(responses.create, **ask, **question, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in (events[0], events[-1])] == ["response.created", f"response.{ending}"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == first.output_text == events[-1].response.output_text
    if target.standin is not None:
        _, final = await way.helped(responses.stream, "get_final_response", **ask, **question, store=False)
        assert final.output_text == text
        assert final.usage.output_tokens == first.usage.output_tokens

    second = await way.get(responses.create, **ask, input="And of Spain?", previous_response_id=first.id)
    check_text(target, second.output_text)
    assert second.previous_response_id == first.id
    if target.brand not in ("worker", "anthropic"):
        assert target.standin is not None
        said = [(each["role"], each["content"]) for each in target.standin.seen[-1].body["messages"]]
        assert said == [("user", question["input"]), ("assistant", TEXT), ("user", "And of Spain?")]
    retrieved = await way.get(responses.retrieve, first.id)
    assert retrieved.to_dict() == first.to_dict()
    items = await way.listed(responses.input_items.list, response_id=second.id)
    assert len(items) == 3
    await way.get(responses.delete, first.id)
    for method in (responses.retrieve, responses.delete):
        with pytest.raises(openai.NotFoundError):
            await way.get(method, first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        await way.get(responses.create, **ask, input="And?", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"


def response_calls(response: Any) -> list[tuple[str, str, Any]]:
    items = [item for item in response.output if item.type == "function_call"]
    return [(item.call_id, item.name, json.loads(item.arguments)) for item in items]


@before_all(worker=("awaited",))
async def test_responses_with_tools(target: Target, way: Way) -> None:
    responses = way.openai.responses
    ask = {"model": target.model, "temperature": 0, "max_output_tokens": 80, "tools": RESPONSE_TOOLS}
    ask |= {"parallel_tool_calls": False}
    events, first = await way.helped(
        responses.stream, "get_final_response", **ask, input="Weather?", tool_choice="required"
    )
    calls = response_calls(first)
    check_calls(target, calls)
    ends = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in ends] == [arguments for _, _, arguments in calls]
    if target.standin is not None:
        whole = await way.get(responses.create, **ask, input="Weather?", tool_choice="required", store=False)
        assert response_calls(whole) == calls
    results: Any = [{"type": "function_call_output", "call_id": id, "output": "Fine."} for id, _, _ in calls]
    second = await way.get(
        responses.create,
        **ask | {"max_output_tokens": SHORT},
        input=results,
        previous_response_id=first.id,
        tool_choice="none",
    )
    check_text(target, second.output_text)


def message_calls(message: Any) -> list[tuple[str, str, Any]]:
    return [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]


@before_all(worker=("blocking",))
async def test_messages(target: Target, way: Way) -> None:
    messages = way.anthropic.messages
    ask = {"model": target.model, "max_tokens": SHORT, "system": "Be short.", "messages": [QUESTION]}
    ask |= {"extra_body": {"temperature": 0}}
    whole = await way.get(messages.create, **ask)
    (block,) = whole.content
    check_text(target, block.text)
    assert (whole.model, whole.role, whole.type) == (target.model, "assistant", "message")
    assert whole.stop_reason in (("end_turn", "max_tokens") if target.standin is None else ("end_turn",))
    events = await way.listed(messages.create, **ask, stream=True)
    assert [event.type for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == block.text
    events, final = await way.helped(messages.stream, "get_final_message", **ask)
    assert "".join(event.text for event in events if event.type == "text") == text
    assert [each.text for each in final.content] == [text]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    prompt_tokens = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert target.standin is None or prompt_tokens == PROMPT_TOKENS
    count = {"model": target.model, "messages": [QUESTION], "system": "Be short."}
    counted = await way.get(messages.count_tokens, **count)
    assert counted.input_tokens > 0
    if target.standin is None:
        async with asyncio.timeout(20):  # until the gateway has learned its tokenizer
            while (await way.get(messages.count_tokens, **count)).input_tokens != prompt_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert target.model in [model.id for model in await way.listed(way.anthropic.models.list)]
    assert (await way.get(way.anthropic.models.retrieve, target.model)).id == target.model


@before_all(worker=("blocking",))
async def test_messages_with_tools(target: Target, way: Way) -> None:
    messages = way.anthropic.messages
    ask = {"model": target.model, "max_tokens": 80, "tools": MESSAGE_TOOLS, "extra_body": {"temperature": 0}}
    forced = {"type": "any", "disable_parallel_tool_use": True}
    _, first = await way.helped(messages.stream, "get_final_message", **ask, messages=[QUESTION], tool_choice=forced)
    calls = message_calls(first)
    check_calls(target, calls)
    assert first.stop_reason == "tool_use"
    if target.standin is not None:
        whole = await way.get(messages.create, **ask, messages=[QUESTION], tool_choice=forced)
        assert (message_calls(whole), whole.stop_reason) == (calls, "tool_use")
    results = [{"type": "tool_result", "tool_use_id": id, "content": "It is fine."} for id, _, _ in calls]
    conversation = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    answer = await way.get(
        messages.create, **ask | {"max_tokens": SHORT}, messages=conversation, tool_choice={"type": "none"}
    )
    check_text(target, answer.content[0].text)
