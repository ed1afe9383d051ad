"""SGLang's server.

- Errors are bare: ``{"object": "error", "message", "type", "param", "code"}``, the code the HTTP status; a missing key
  is ``{"error": "Unauthorized"}``. In a stream the same stands under ``error``, its code 400 whatever it was, and
  ``[DONE]`` comes behind it.
- Usage is in a chunk of its own, with ``continuous_usage_stats`` in each.
- ``matched_stop`` stands beside ``finish_reason``; deltas tell ``reasoning_content: null`` where there is none.

Reference: https://docs.sglang.ai/basic_usage/openai_api_completions.html, and
python/sglang/srt/entrypoints/openai/{serving_base,serving_chat,sse_utils}.py in sgl-project/sglang.
"""

from __future__ import annotations

from typing import ClassVar

from tests.standins.base import Reply, Request, compact
from tests.standins.openai_words import Json, OpenAIWords


class SGLang(OpenAIWords):
    brand = "sglang"
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (
            400,
            "The input (4096 tokens) is longer than the model's context length (2048 tokens).",
            "BadRequestError",
        ),
        "no_model": (404, "The model 'other' does not exist.", "NotFoundError"),
        "rate_limited": (503, "The request queue is full.", "SERVICE_UNAVAILABLE"),
        "failing": (500, "Internal server error: list index out of range", "InternalServerError"),
        "loading": (503, "Server is starting.", "ServiceUnavailable"),
    }

    def refused(self, scenario: str, request: Request) -> Reply:
        if scenario == "unauthorized":
            return Reply(status=401, body=b'{"error":"Unauthorized"}')
        status, message, kind = self.errors[scenario]
        return Reply(status=status, body=compact(_bare(message, kind, status)))

    def error_event(self) -> bytes:
        return self.piece({"error": _bare("Generation aborted.", "BadRequestError", 400)})

    def chunk_choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None} | delta
        return super().chunk_choice(index, delta, finish) | {"matched_stop": None if finish is None else 2}

    def chunk(self, request: Request, choices: list[Json], **more: object) -> Json:
        return super().chunk(request, choices) | {"usage": None} | more

    def model_card(self) -> Json:
        return super().model_card() | {"root": self.model, "max_model_len": 2048}


def _bare(message: str, kind: str, status: int) -> Json:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
