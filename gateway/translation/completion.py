"""What an answer's translators read of a chat completion, whole or a chunk of a stream, however servers word it.

References: https://platform.openai.com/docs/api-reference/chat/object,
https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.ask import Untranslatable


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None

    def arguments_text(self) -> str:
        """Servers that do not keep to the API give an object instead of its text."""
        if isinstance(self.arguments, str):
            return self.arguments
        return "" if self.arguments is None else msgspec.json.encode(self.arguments).decode()


class Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: Function | None = None

    @property
    def called(self) -> Function:
        return self.function or Function()


class Said(msgspec.Struct):
    """A message, or what a chunk adds to it."""

    content: Any = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        """Of a content that is text, or a list of parts."""
        if isinstance(self.content, str):
            return self.content
        parts = self.content if isinstance(self.content, list) else ()
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))


class Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    index: int | None = None
    delta: Said | None = None
    message: Said | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """The stop string that ended the text, as vLLM and our worker tell it."""


class Completion(msgspec.Struct):
    id: Any = None
    choices: list[Choice] | None = None
    usage: Any = None
    service_tier: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(Completion)


def read_completion(data: bytes) -> Completion:
    """Raises Untranslatable."""
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise Untranslatable("is nested too deeply") from None
    except msgspec.DecodeError as fault:
        raise Untranslatable(f"is not as a chat completion's is: {fault}") from None
