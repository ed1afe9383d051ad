"""llama.cpp's ``llama-server``.

- Errors are ``{"error": {"code", "message", "type"}}``, the code the HTTP status; a prompt that does not fit tells
  ``n_prompt_tokens`` and ``n_ctx``, too. While the model loads all is a 503, ``/health`` also.
- A fault in a stream is an event with such an error, and nothing behind it. Until the end of 2025 it was a line
  ``error: {...}``, which is no field of server-sent events, and ``[DONE]`` came behind it (``LlamaCppOfOld``).
- The model's name stands behind the choices, so it is not the first thing that a reader meets.
- Usage is in a chunk of its own if it is asked for; for some weeks of 2025 it stood in the chunk with the reason to
  finish (``LlamaCppOfOld``), asked for or not. ``timings`` stand beside it.
- Any model's name is taken.

Reference: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md; tools/server/server-common.cpp;
issues 15443 and 16048, pull request 16052 of ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.standins.base import CREATED, DONE, Reply, Request, compact
from tests.standins.openai_words import Json, OpenAIWords

TIMINGS = {"prompt_n": 9, "prompt_ms": 180.025, "predicted_n": 5, "predicted_per_second": 35.41120981827196}


class LlamaCpp(OpenAIWords):
    brand = "llamacpp"
    media_type = "text/event-stream"
    errors: ClassVar[dict[str, Json]] = {
        "context_length": {
            "code": 400,
            "message": "request (4096 tokens) exceeds the available context size (2048 tokens), try increasing it",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 4096,
            "n_ctx": 2048,
        },
        "unauthorized": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"},
        "no_model": {"code": 404, "message": "File Not Found", "type": "not_found_error"},
        "rate_limited": {"code": 503, "message": "no slot available", "type": "unavailable_error"},
        "failing": {"code": 500, "message": "Failed to parse messages", "type": "server_error"},
        "loading": {"code": 503, "message": "Loading model", "type": "unavailable_error"},
    }

    def health(self, scenario: str) -> Reply:
        if scenario == "loading":
            return Reply(status=503, body=compact({"error": self.errors["loading"]}))
        return Reply(body=b'{"status":"ok"}')

    def refused(self, scenario: str, request: Request) -> Reply:
        told = self.errors[scenario]
        return Reply(status=told["code"], body=compact({"error": told}))

    def unknown_path(self) -> Reply:
        return Reply(status=404, body=compact({"error": self.errors["no_model"]}))

    def model_card(self) -> Json:
        return super().model_card() | {"meta": {"n_ctx_train": 2048, "n_params": 134515008}}

    def error_event(self) -> bytes:
        return self.piece({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})

    def after_error(self) -> list[bytes]:
        return []

    def keep_alive(self) -> bytes:
        return b":\n\n"

    def chunk(self, request: Request, choices: list[Json], **more: Any) -> Json:
        return {
            "choices": choices,
            "created": CREATED,
            "id": "chatcmpl-bCkQO6qJ",
            "model": request.body["model"],
            "system_fingerprint": "b6497-cd08fc3e",
            "object": "chat.completion.chunk",
        } | more

    def chunk_choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        return {"finish_reason": finish, "index": index, "delta": delta}

    def role_delta(self) -> Json:
        return {"role": "assistant", "content": None}

    def with_usage(self, request: Request, chunks: list[Json], tokens: int) -> list[Json]:
        chunks = super().with_usage(request, chunks, tokens)
        return [*chunks[:-1], chunks[-1] | {"timings": TIMINGS}]


class LlamaCppOfOld(LlamaCpp):
    def error_event(self) -> bytes:
        return b"error: " + compact({"code": 500, "message": "Compute error.", "type": "server_error"}) + b"\n\n"

    def after_error(self) -> list[bytes]:
        return [DONE]

    def with_usage(self, request: Request, chunks: list[Json], tokens: int) -> list[Json]:
        return [*chunks[:-1], chunks[-1] | {"usage": self.usage(tokens), "timings": TIMINGS}]
