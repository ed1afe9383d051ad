"""Messages requests told as chat completions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.anthropic.ask import parse_messages
from gateway.translation.chat_from_messages import chat_from_messages
from gateway.translation.content_blocks import NotAChat
from worker.protocol.errors import ApiError

HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat_of(**fields: Any) -> dict[str, Any]:
    raw = json.dumps({"model": "m", "max_tokens": 9, "messages": HI} | fields).encode()
    chat = chat_from_messages(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    decoded: dict[str, Any] = json.loads(msgspec.json.encode(chat))
    return decoded


def messages_of(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat_of(messages=list(messages), **fields)["messages"]
    return found


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_texts_and_images() -> None:
    assert messages_of(user(text("\u00e9 \U0001f30a\n"))) == [{"role": "user", "content": "\u00e9 \U0001f30a\n"}]
    assert messages_of(user(text("a"), text(""), IMAGE)) == [user(text("a"), IMAGE_PART)]
    url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    assert messages_of(user(url)) == [user({"type": "image_url", "image_url": {"url": "https://x/y.png"}})]
    assert messages_of(user()) == [{"role": "user", "content": ""}]


def test_system_is_the_first_message() -> None:
    assert messages_of(*HI, system="be") == [{"role": "system", "content": "be"}, *HI]
    one = [text("be") | {"cache_control": {"type": "ephemeral"}}]
    assert messages_of(*HI, system=one) == [{"role": "system", "content": "be"}, *HI]
    assert messages_of(*HI, system=[text("be"), text("short")])[0]["content"] == [text("be"), text("short")]
    assert messages_of(*HI, system=[]) == HI
    later = {"role": "system", "content": "now"}
    assert messages_of(*HI, later) == [*HI, later]


def test_results_of_tools_stand_right_behind_their_calls() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1.10, "b": "\u00e9"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("r"), IMAGE]}
    failed = {"type": "tool_result", "tool_use_id": "t2", "is_error": True}
    found = messages_of(assistant(thought, text("ok"), use, use | {"id": "t2"}), user(text("so"), result, failed))
    called, first, second, said = found
    assert called["content"] == "ok"
    assert [call["id"] for call in called["tool_calls"]] == ["t1", "t2"]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == use["input"]
    assert (first["role"], first["tool_call_id"], first["content"][0]) == ("tool", "t1", text("r"))
    assert (second["role"], second["tool_call_id"], second["content"]) == ("tool", "t2", "Error: ")
    assert said["content"][1:] == [IMAGE_PART, text("so")]
    assert "t1" in said["content"][0]["text"]
    assert messages_of(assistant(use), user(failed | {"tool_use_id": "t1"}))[0]["content"] is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("it broke", "Error: it broke"),
        ("Error 5", "Error 5"),
        ([text("a"), text("b")], [text("Error:"), text("a"), text("b")]),
        ([], "Error: "),
    ],
)
def test_an_error_of_a_tool_is_marked(content: Any, told: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    assert messages_of(user(result | {"is_error": True}))[0]["content"] == told
    assert messages_of(user(result | {"is_error": False}))[0]["content"] == (content or "")


def test_what_a_model_wrote_instead_of_json_goes_back_as_it_was() -> None:
    for input_, arguments in (
        ({"INVALID_JSON": '{"a'}, '{"a'),
        ({"INVALID_JSON": 5}, '{"INVALID_JSON": 5}'),
        ({"INVALID_JSON": "x", "more": 1}, '{"INVALID_JSON": "x", "more": 1}'),
    ):
        use = {"type": "tool_use", "id": "t", "name": "f", "input": input_}
        assert messages_of(assistant(use))[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_documents() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "x\ny"}}
    assert messages_of(user(plain))[0]["content"] == "T\n\nx\ny"
    blocks = {"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}}
    assert messages_of(user(blocks)) == [user(text("a"), IMAGE_PART)]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    file = {"filename": "document.pdf", "file_data": "data:application/pdf;base64,JVBE"}
    assert messages_of(user(pdf)) == [user({"type": "file", "file": file})]
    found = {"type": "search_result", "source": "https://x", "title": "T", "content": [text("a")]}
    assert messages_of(user(found)) == [user(text("T\n\nhttps://x"), text("a"))]


def test_tools_and_the_choice_among_them() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True, "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    for choice, told in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ):
        chat = chat_of(tools=[tool, {"type": "custom", "name": "g"}], tool_choice=choice)
        assert chat["tools"][0] == {"type": "function", "function": function}
        assert (chat["tool_choice"], "parallel_tool_calls" in chat) == (told, False)
    chat = chat_of(tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert chat["parallel_tool_calls"] is False
    assert "tool_choice" not in chat_of(tool_choice={"type": "none"}, tools=[])


def test_how_much_is_thought_and_what_form_the_text_has() -> None:
    for fields, effort in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**30}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}, "high"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
    ):
        assert chat_of(**fields).get("reasoning_effort") == effort
    form = chat_of(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})["response_format"]
    assert (form["type"], form["json_schema"]["schema"]) == ("json_schema", {"type": "object"})


def test_what_goes_over_and_what_does_not() -> None:
    chat = chat_of(
        stream=True, top_k=5, temperature=0, seed=0, stop_sequences=["x"], metadata={"user_id": "u"}, x_new={"a": [1]},
        n=50, max_completion_tokens=10**6, stream_options={}, container="c", service_tier="auto", betas=["b"],
        stop=["z"], web_search_options={"a": 1}, mcp_servers=[],
    )  # fmt: skip
    assert chat == {
        "model": "m", "max_tokens": 9, "messages": HI, "stream": True, "stream_options": {"include_usage": True},
        "top_k": 5, "temperature": 0, "seed": 0, "stop": ["x"], "user": "u", "x_new": {"a": [1]},
    }  # fmt: skip


def test_a_prefilled_answer_is_gone_on_with() -> None:
    chat = chat_of(messages=[*HI, assistant(text("The best answer is ("))])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_of()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"input_schema": {}}]}, "no 'name'"),
        ({"tools": [5]}, "'tools'"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "odd"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        ({"messages": [user({"type": "container_upload", "file_id": "f"})]}, "container_upload"),
        ({"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]}, "an image"),
        ({"messages": [user({"type": "document", "source": {"type": "url", "url": "https://x"}})]}, "a document"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]"),
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id"),
        ({"messages": [assistant({"type": "tool_use", "id": "t"})]}, "'input'"),
        ({"messages": [assistant(IMAGE)]}, "more than text"),
        ({"system": [IMAGE]}, "more than text"),
        ({"output_config": {"format": {"type": "odd"}}}, "output format"),
        ({"messages": [user(*[text("x")] * 100_001)]}, "braces"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_chat_completion_can_say(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(NotAChat, match=said):
        chat_of(**fields)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
GOOD: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [text("be")],
    "messages": [
        user(text("a"), IMAGE, {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}),
        assistant({"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}),
        user({"type": "tool_result", "tool_use_id": "t", "content": [text("r"), IMAGE], "is_error": True}),
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "stream": True,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, child in inner for place in places(child, (*path, key))]


PLACES = places(GOOD)


@given(st.lists(st.tuples(st.sampled_from(PLACES), ANY), min_size=1, max_size=3))
@settings(max_examples=200)
def test_wild_requests_are_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    request = json.loads(json.dumps(GOOD))
    for (*way, last), value in changes:
        found = request
        try:
            for key in way:
                found = found[key]
            found[last] = value
        except (TypeError, KeyError, IndexError):
            continue
    try:
        ask = parse_messages(json.dumps(request).encode())
    except ApiError as error:
        assert error.status == 400
        assert error.body.message
        return
    assert (ask.chat is None) == bool(ask.not_chat)
    if ask.chat is not None:
        chat = json.loads(msgspec.json.encode(ask.chat))
        assert chat["messages"]
        assert "n" not in chat


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\\u0000"}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[' + b"[" * 50_000 + b"]" * 50_000 + b"]}]}",
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a","content":[5]}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_use","input":'
        + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}]}]}",
        b'{"model":"m","max_tokens":1e400,"messages":[{}]}',
        b'{"model":"m","max_tokens":NaN,"messages":[{}]}',
        b'{"model":"m","max_tokens":1,"messages":[null]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
    ],
)  # fmt: skip
def test_hostile_bytes_do_no_harm(raw: bytes) -> None:
    try:
        ask = parse_messages(raw)
    except ApiError as error:
        assert error.status == 400
    else:
        assert ask.max_output_tokens == 1
        msgspec.json.encode(ask.chat or {})
