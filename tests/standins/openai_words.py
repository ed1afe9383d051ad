"""What all the stand-ins that are compatible with OpenAI's API have in common: routes, scenarios, and plain bodies.

Scenarios: ``text``, ``tools``, ``reasoning``, ``keep_alive`` (comments while it thinks), ``running_usage`` (totals in
each event); refusals ``context_length``, ``unauthorized``, ``no_model``, ``rate_limited``, ``failing``, ``loading``;
faults in a stream ``error_first`` (before any content), ``error_in_stream``, ``cut``. ``n`` and ``logprobs`` of a
request are obeyed where the brand has them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.standins.base import (
    CACHED_TOKENS,
    CALLS,
    CREATED,
    DONE,
    EVENT_STREAM,
    KEY,
    PIECES,
    PROMPT_TOKENS,
    REASONING,
    TEXT,
    Reply,
    Request,
    StandIn,
    compact,
    event,
)

REFUSALS = ("context_length", "unauthorized", "no_model", "rate_limited", "failing", "loading")
Json = dict[str, Any]


class OpenAIWords(StandIn):
    """A brand says in its own class what it does otherwise."""

    prefix: ClassVar[str] = "/v1"
    model: ClassVar[str] = "the-model"
    media_type: ClassVar[str] = EVENT_STREAM
    completions_served: ClassVar[bool] = True
    embeddings_served: ClassVar[bool] = True

    def answer(self, request: Request, scenario: str) -> Reply:
        path = request.path.removeprefix(self.base_path + self.prefix)
        if request.path == "/health":
            return self.health(scenario)
        if self.needs_key and request.headers.get("authorization") != f"Bearer {KEY}":
            return self.refused("unauthorized", request)
        if scenario in REFUSALS:
            return self.refused(scenario, request)
        if path == "/models":
            return Reply(body=compact({"object": "list", "data": [self.model_card()]}))
        if path == "/chat/completions":
            if request.body.get("stream"):
                return self.streamed(self.chat_stream(request, scenario), scenario)
            return Reply(body=compact(self.whole_chat(request, scenario)))
        if path == "/completions" and self.completions_served:
            if request.body.get("stream"):
                return self.streamed(self.completion_stream(request), scenario)
            return Reply(body=compact(self.whole_completion(request)))
        if path == "/embeddings" and self.embeddings_served:
            return Reply(body=compact(self.embeddings(request)))
        return self.unknown_path()

    # What brands do otherwise.

    def health(self, scenario: str) -> Reply:
        return Reply(status=503 if scenario == "loading" else 200, body=b"")

    def refused(self, scenario: str, request: Request) -> Reply:
        raise NotImplementedError

    def error_event(self) -> bytes:
        """The piece that tells of a fault in a stream."""
        raise NotImplementedError

    def unknown_path(self) -> Reply:
        return Reply(status=404, body=b'{"detail":"Not Found"}')

    def model_card(self) -> Json:
        return {"id": self.model, "object": "model", "created": CREATED, "owned_by": self.brand}

    def usage(self, completion_tokens: int) -> Json:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": PROMPT_TOKENS + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }

    def chunk(self, request: Request, choices: list[Json], **more: Any) -> Json:
        head = {"id": "chatcmpl-0a1b2c", "object": "chat.completion.chunk", "created": CREATED}
        return head | {"model": request.body["model"], "choices": choices} | more

    def chunk_choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def role_delta(self) -> Json:
        return {"role": "assistant", "content": ""}

    def reasoning_delta(self, text: str) -> Json:
        return {"reasoning_content": text}

    def tool_deltas(self) -> list[Json]:
        """Name and id first, then the arguments piece by piece."""
        deltas: list[Json] = []
        for index, call in enumerate(CALLS):
            head = {"index": index, "id": call.id, "type": "function"}
            deltas.append({"tool_calls": [head | {"function": {"name": call.name, "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in call.arguments]
        return deltas

    def message(self, scenario: str) -> Json:
        message: Json = {"role": "assistant", "content": None if scenario == "tools" else TEXT}
        if scenario == "reasoning":
            message |= self.reasoning_delta("".join(REASONING))
        if scenario == "tools":
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in CALLS
            ]
        return message

    def finish_reason(self, scenario: str, *, streamed: bool) -> str:
        return "tool_calls" if scenario == "tools" else "stop"

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def piece(self, chunk: Json) -> bytes:
        return event(chunk)

    # What all do alike.

    def streamed(self, pieces: list[bytes], scenario: str) -> Reply:
        if scenario == "cut":
            return Reply(pieces=pieces[:3], media_type=self.media_type, cut=True)
        if scenario == "error_first":
            pieces = [self.error_event(), *self.after_error()]
        elif scenario == "error_in_stream":
            pieces = [*pieces[:3], self.error_event(), *self.after_error()]
        elif scenario == "keep_alive":
            pieces = [self.keep_alive(), self.keep_alive(), *pieces]
        return Reply(pieces=pieces, media_type=self.media_type)

    def after_error(self) -> list[bytes]:
        return [DONE]

    def deltas(self, scenario: str) -> list[Json]:
        """Of one choice, after the one with the role; one token each."""
        if scenario == "tools":
            return self.tool_deltas()
        said = [{"content": piece} for piece in PIECES]
        return [self.reasoning_delta(piece) for piece in REASONING] + said if scenario == "reasoning" else said

    def chat_stream(self, request: Request, scenario: str) -> list[bytes]:
        choices = range(request.body.get("n") or 1)
        chunks = [self.chunk(request, [self.chunk_choice(index, self.role_delta())]) for index in choices]
        tokens = 0
        for delta in self.deltas(scenario):
            for index in choices:
                tokens += 1
                chunk = self.chunk(request, [self.chunk_choice(index, delta)])
                if scenario == "running_usage":
                    chunk["usage"] = self.usage(tokens)
                chunks.append(chunk)
        finish = self.finish_reason(scenario, streamed=True)
        chunks += [self.chunk(request, [self.chunk_choice(index, {}, finish)]) for index in choices]
        return [*map(self.piece, self.with_usage(request, chunks, tokens)), DONE]

    def with_usage(self, request: Request, chunks: list[Json], tokens: int) -> list[Json]:
        """Usage in a chunk of its own, if it is asked for."""
        if (request.body.get("stream_options") or {}).get("include_usage"):
            return [*chunks, chunks[-1] | {"choices": [], "usage": self.usage(tokens)}]
        return chunks

    def whole_chat(self, request: Request, scenario: str) -> Json:
        count = request.body.get("n") or 1
        finish = self.finish_reason(scenario, streamed=False)
        choices = [
            {"index": index, "message": self.message(scenario), "logprobs": None, "finish_reason": finish}
            for index in range(count)
        ]
        tokens = len(self.deltas(scenario)) * count
        head = {"id": "chatcmpl-0a1b2c", "object": "chat.completion", "created": CREATED}
        return head | {"model": request.body["model"], "choices": choices, "usage": self.usage(tokens)}

    def completion_chunk(self, request: Request, text: str, finish: str | None = None) -> Json:
        head = {"id": "cmpl-0a1b2c", "object": "text_completion", "created": CREATED, "model": request.body["model"]}
        return head | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}

    def completion_stream(self, request: Request) -> list[bytes]:
        chunks = [self.completion_chunk(request, piece) for piece in PIECES]
        chunks.append(self.completion_chunk(request, "", "stop"))
        return [*map(self.piece, self.with_usage(request, chunks, len(PIECES))), DONE]

    def whole_completion(self, request: Request) -> Json:
        return self.completion_chunk(request, TEXT, "stop") | {"usage": self.usage(len(PIECES))}

    def embeddings(self, request: Request) -> Json:
        inputs = request.body.get("input")
        count = len(inputs) if isinstance(inputs, list) else 1
        data = [{"object": "embedding", "index": index, "embedding": [0.25, -0.5, 1.0]} for index in range(count)]
        usage = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
        return {"object": "list", "data": data, "model": request.body["model"], "usage": usage}


def error(message: str, kind: str, *, code: str | int | None = None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
