"""The official SDKs put a replayed stream together as they read the whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anthropic
import openai

from gateway.apis import Api
from gateway.assembly import assembler, describe, replay
from tests.gateway.assembly.answers import USAGE
from tests.standins.anthropic_words import BARE_TOOL, REDACTED, TEXT, THINKING, TOOL, events_of, message

TOOL_CALLS = [
    {
        "id": f"call_{at}",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 12}' * 3},
    }
    for at in range(2)
]
TOKEN = {"token": "Hello", "logprob": -0.25, "bytes": [72], "top_logprobs": []}
CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "m",
    "system_fingerprint": "fp_1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße, 世界! 🦜 " * 20, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": None, "tool_calls": TOOL_CALLS},
            "logprobs": None,
            "finish_reason": "tool_calls",
        },
        {
            "index": 2,
            "message": {"role": "assistant", "content": "Hello" * 9, "reasoning_content": "So." * 30},
            "logprobs": {"content": [TOKEN] * 9, "refusal": None},
            "finish_reason": "stop",
        },
        {
            "index": 3,
            "message": {"role": "assistant", "content": None, "refusal": "I can't help with that, sorry. " * 3},
            "logprobs": None,
            "finish_reason": "stop",
        },
    ],
    "usage": USAGE,
}
MESSAGE = message(THINKING, REDACTED, TEXT, TOOL, BARE_TOOL, {"type": "text", "text": ""}, stop_reason="tool_use")
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1_700_000_000,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "model": "m",
    "output": [
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Thought about it. " * 5}],
            "content": [{"type": "reasoning_text", "text": "Hm. " * 30}],
            "status": "completed",
        },
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Grüße! 🦜 " * 20, "annotations": [], "logprobs": [TOKEN]},
                {"type": "refusal", "refusal": "But not that."},
            ],
        },
        {
            "id": "fc_1",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "weather",
            "arguments": '{"city": "Zürich"}' * 4,
        },
    ],
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "usage": {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    },
}


@contextmanager
def served(api: Api, answer: dict[str, Any]) -> Iterator[str]:
    """URL of a server that answers with the replayed stream, or the whole where no stream is asked for."""
    body = json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            streamed = bool(asked.get("stream"))
            sent = b"".join(on_the_wire(api, body)) if streamed else body
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if streamed else "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def on_the_wire(api: Api, body: bytes) -> Iterator[bytes]:
    for event in replay(api, body, include_usage=True):
        kind = json.loads(event).get("type", "")
        yield (f"event: {kind}\n".encode() if kind else b"") + b"data: %b\n\n" % event
    if api == "chat_completions":
        yield b"data: [DONE]\n\n"


def test_openai_puts_a_chat_completion_together() -> None:
    with (
        served("chat_completions", CHAT) as url,
        openai.OpenAI(api_key="k", base_url=f"{url}/v1") as client,
    ):
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        whole = client.chat.completions.create(**asked)
    assert len(deltas) > 10
    assert as_said(final) == as_said(whole)


def as_said(completion: Any) -> dict[str, Any]:
    """Without what the SDK parses, and without None: its streams leave out what they were not told."""
    said: dict[str, Any] = completion.to_dict()
    for choice in said["choices"]:
        choice["message"] = {name: value for name, value in choice["message"].items() if name != "parsed" and value}
        for call in choice["message"].get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
    return said


def test_openai_puts_a_response_together() -> None:
    with (
        served("responses", RESPONSE) as url,
        openai.OpenAI(api_key="k", base_url=f"{url}/v1") as client,
    ):
        with client.responses.stream(model="m", input="Hello") as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = client.responses.create(model="m", input="Hello")
    assert final.output_text == whole.output_text == RESPONSE["output"][1]["content"][0]["text"]
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert len(snapshots) > 2
    assert snapshots[-1] == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.to_dict() == RESPONSE
    for item, same in zip(final.to_dict()["output"], RESPONSE["output"], strict=True):
        assert without_parsed(item) == same


def without_parsed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_parsed(each) for name, each in value.items() if not name.startswith("parsed")}
    return [without_parsed(each) for each in value] if isinstance(value, list) else value


def test_anthropic_puts_a_message_together() -> None:
    with (
        served("messages", MESSAGE) as url,
        anthropic.Anthropic(api_key="k", base_url=url) as client,
    ):
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        whole = client.messages.create(**asked)
    assert whole.to_dict() == MESSAGE
    assert {name: value for name, value in final.to_dict().items() if value is not None} == {
        name: value for name, value in MESSAGE.items() if value is not None
    }


def test_a_message_of_anthropics_own_stream_is_put_together() -> None:
    found = assembler("messages", limit=10**6)
    for event in events_of(MESSAGE):
        found.feed(json.dumps(event).encode())
    whole = found.whole(None)
    assert whole is not None
    assert json.loads(whole) == MESSAGE
    assert describe("messages", whole).has_tool_calls
