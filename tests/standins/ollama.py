"""Ollama's compatible endpoints.

- Errors are OpenAI's, their code null; their type is one of three. There is no 429: a full queue is a 503.
- A fault in a stream is not told: a chunk without content comes, then the body ends without ``[DONE]``.
- Tool calls come whole, in one delta. The reason to finish has a chunk of its own. Reasoning is ``reasoning``.
- Usage is in a chunk of its own, if it is asked for.
- It knows ``max_tokens`` only, takes any key, and answers one choice whatever ``n`` says.

Reference: https://docs.ollama.com/api/openai-compatibility; openai/openai.go and middleware/openai.go in ollama/ollama.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.standins.base import CALLS, CREATED, PROMPT_TOKENS, Reply, Request, compact
from tests.standins.openai_words import Json, OpenAIWords, error


class Ollama(OpenAIWords):
    brand = "ollama"
    media_type = "text/event-stream"
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (400, "the input length exceeds the context length", "invalid_request_error"),
        "unauthorized": (401, "unauthorized", "api_error"),
        "no_model": (404, "model 'other' not found", "not_found_error"),
        "rate_limited": (503, "server busy, please try again.  maximum pending requests exceeded", "api_error"),
        "failing": (500, "llama runner process has terminated: exit status 2", "api_error"),
        "loading": (503, "server busy, please try again.  maximum pending requests exceeded", "api_error"),
    }

    def refused(self, scenario: str, request: Request) -> Reply:
        status, message, kind = self.errors[scenario]
        return Reply(status=status, body=compact(error(message, kind)) + b"\n")

    def unknown_path(self) -> Reply:
        return Reply(status=404, body=b"404 page not found", media_type="text/plain")

    def model_card(self) -> Json:
        return {"id": self.model, "object": "model", "created": CREATED, "owned_by": "library"}

    def error_event(self) -> bytes:
        return self.piece(self._chunk("the-model", [self.chunk_choice(0, {"role": "assistant", "content": ""})]))

    def after_error(self) -> list[bytes]:
        return []

    def usage(self, completion_tokens: int) -> Json:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": completion_tokens,
            "total_tokens": PROMPT_TOKENS + completion_tokens,
        }

    def chunk(self, request: Request, choices: list[Json], **more: Any) -> Json:
        return self._chunk(request.body["model"], choices) | more

    def _chunk(self, model: str, choices: list[Json]) -> Json:
        head = {"id": "chatcmpl-123", "object": "chat.completion.chunk", "created": CREATED, "model": model}
        return head | {"system_fingerprint": "fp_ollama", "choices": choices}

    def chunk_choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        return {"index": index, "delta": delta, "finish_reason": finish}

    def reasoning_delta(self, text: str) -> Json:
        return {"reasoning": text}

    def deltas(self, scenario: str) -> list[Json]:
        first, *rest = super().deltas(scenario)
        return [{"role": "assistant", "content": ""} | first, *rest]

    def tool_deltas(self) -> list[Json]:
        calls = [
            {
                "id": call.id,
                "index": index,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for index, call in enumerate(CALLS)
        ]
        return [{"tool_calls": calls}]

    def chat_stream(self, request: Request, scenario: str) -> list[bytes]:
        """One choice, and no chunk for the role alone."""
        chunks = [self.chunk(request, [self.chunk_choice(0, delta)]) for delta in self.deltas(scenario)]
        tokens = len(chunks)
        if scenario == "running_usage":
            chunks = [chunk | {"usage": self.usage(place + 1)} for place, chunk in enumerate(chunks)]
        finish = self.finish_reason(scenario, streamed=True)
        chunks.append(self.chunk(request, [self.chunk_choice(0, {}, finish)]))
        return [*map(self.piece, self.with_usage(request, chunks, tokens)), b"data: [DONE]\n\n"]

    def whole_chat(self, request: Request, scenario: str) -> Json:
        message = self.message(scenario) | ({"content": ""} if scenario == "tools" else {})
        for place, call in enumerate(message.get("tool_calls", ())):
            call["index"] = place
        finish = self.finish_reason(scenario, streamed=False)
        head = {"id": "chatcmpl-123", "object": "chat.completion", "created": CREATED, "model": request.body["model"]}
        choices = [{"index": 0, "message": message, "finish_reason": finish}]
        usage = self.usage(len(self.deltas(scenario)))
        return head | {"system_fingerprint": "fp_ollama", "choices": choices, "usage": usage}
