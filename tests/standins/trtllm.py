"""TensorRT-LLM's ``trtllm-serve``.

- Errors are bare: ``{"object": "error", "message", "type", "param", "code"}``. What fails in a stream breaks the
  connection off: no event tells it.
- The first event of a chat, with the role, has a space at its end; chunks leave out what is null.
- Usage is in a chunk of its own, which does have its nulls.
- No key is asked for, and there are no embeddings.

Reference: https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/index.html, and
tensorrt_llm/serve/{openai_server,openai_protocol,postprocess_handlers}.py in NVIDIA/TensorRT-LLM.
"""

from __future__ import annotations

from typing import ClassVar

from tests.standins.base import Reply, Request, compact, event
from tests.standins.openai_words import Json, OpenAIWords


class TensorRTLLM(OpenAIWords):
    brand = "trtllm"
    embeddings_served = False
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (
            400,
            "The sum of prompt length (4096), query length (0) should not exceed max_num_tokens (2048)",
            "BadRequestError",
        ),
        "unauthorized": (401, "no key is known here", "AuthenticationError"),
        "no_model": (404, "The model `other` does not exist.", "NotFoundError"),
        "rate_limited": (429, "Too many requests.", "TooManyRequestsError"),
        "failing": (500, "Internal server error", "InternalServerError"),
        "loading": (503, "The server is not ready.", "ServiceUnavailableError"),
    }

    def refused(self, scenario: str, request: Request) -> Reply:
        status, message, kind = self.errors[scenario]
        told = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return Reply(status=status, body=compact(told))

    def streamed(self, pieces: list[bytes], scenario: str) -> Reply:
        if scenario in ("error_first", "error_in_stream"):
            return Reply(
                pieces=pieces[: 3 if scenario == "error_in_stream" else 0], media_type=self.media_type, cut=True
            )
        return super().streamed(pieces, scenario)

    def chat_stream(self, request: Request, scenario: str) -> list[bytes]:
        pieces = super().chat_stream(request, scenario)
        return [pieces[0].removesuffix(b"\n\n") + b" \n\n", *pieces[1:]]

    def piece(self, chunk: Json) -> bytes:
        return event(_without_nulls(chunk) if chunk.get("choices") else chunk)

    def whole_chat(self, request: Request, scenario: str) -> Json:
        whole = super().whole_chat(request, scenario)
        for choice in whole["choices"]:
            choice["message"].setdefault("tool_calls", [])
            choice |= {"stop_reason": None, "disaggregated_params": None}
        return whole


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
