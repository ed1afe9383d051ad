"""vLLM's ``vllm serve``.

- Errors are ``{"error": {"message", "type", "param", "code"}}`` with the HTTP status for their code; older versions
  sent these fields bare, beside ``"object": "error"`` (``VLLMOfOld``). A missing key is ``{"error": "Unauthorized"}``.
- A fault in a stream is an event with such an error, and ``[DONE]`` behind it.
- Usage is in a chunk of its own, with ``continuous_usage_stats`` in each as a running total.
- The first chunk has the role and empty content; ``stop_reason`` stands beside ``finish_reason``.
- Reasoning is ``reasoning``, before that it was ``reasoning_content``.
- ``/health`` is open to all, and 503 once the engine died.

Reference: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, and the generators and errors of
vllm/entrypoints/openai/{engine,chat_completion,completion}/serving.py in vllm-project/vllm.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.standins.base import Reply, Request, compact
from tests.standins.openai_words import Json, OpenAIWords, error


class VLLM(OpenAIWords):
    brand = "vllm"
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (
            400,
            "This model's maximum context length is 2048 tokens. However, you requested 4096 output tokens and your "
            "prompt contains 9 input tokens.",
            "BadRequestError",
        ),
        "no_model": (404, "The model `other` does not exist.", "NotFoundError"),
        "rate_limited": (429, "Too many requests are waiting.", "TooManyRequestsError"),
        "failing": (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "Internal"),
        "loading": (503, "The server is not ready yet.", "ServiceUnavailableError"),
    }

    def wrapped(self, status: int, message: str, kind: str) -> Json:
        return error(message, kind, code=status, param="model" if status == 404 else None)

    def refused(self, scenario: str, request: Request) -> Reply:
        if scenario == "unauthorized":
            return Reply(status=401, body=b'{"error":"Unauthorized"}')
        status, message, kind = self.errors[scenario]
        headers = {"retry-after": "2"} if status == 429 else {}
        return Reply(status=status, body=compact(self.wrapped(status, message, kind)), headers=headers)

    def error_event(self) -> bytes:
        return self.piece(error("Internal server error", "InternalServerError", code=500))

    def reasoning_delta(self, text: str) -> Json:
        return {"reasoning": text}

    def chat_stream(self, request: Request, scenario: str) -> list[bytes]:
        first, *pieces = super().chat_stream(request, scenario)
        more = b',"prompt_token_ids":null,"prompt_text":null}\n\n'
        return [first.removesuffix(b"}\n\n") + more, *pieces]

    def chunk_choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        stop: Json = {} if finish is None else {"stop_reason": None}
        return super().chunk_choice(index, delta, finish) | stop

    def model_card(self) -> Json:
        return super().model_card() | {"root": "/models/m", "parent": None, "max_model_len": 2048}

    def whole_chat(self, request: Request, scenario: str) -> Json:
        more: dict[str, Any] = {"prompt_logprobs": None, "kv_transfer_params": None}
        return super().whole_chat(request, scenario) | more


class VLLMOfOld(VLLM):
    def reasoning_delta(self, text: str) -> Json:
        return {"reasoning_content": text}

    def wrapped(self, status: int, message: str, kind: str) -> Json:
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}

    def error_event(self) -> bytes:
        return self.piece({"error": self.wrapped(400, "the engine is dead", "BadRequestError")})
