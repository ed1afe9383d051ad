"""Reads a chat completion request: what the gateway must know of it is checked here, the rest is the backend's."""

from __future__ import annotations

from gateway.ask import Ask, Body, given
from gateway.http.openai.fields import (
    MAX_CHOICES,
    check_messages,
    read_body,
    read_count,
    read_end_user,
    read_flag,
    read_include_usage,
    read_model,
    read_tags,
)


def parse_chat(raw: bytes, *, end_user: str | None = None, tags: str | None = None) -> Ask:
    """``end_user``, ``tags``: what the headers of these names say.

    Takes time in proportion to the bytes, not to the values in them. Raises ApiError (400) that names the field and
    the remedy.
    """
    body = read_body(raw, "messages")
    model = read_model(body)
    check_messages(body)
    stream = read_flag(body, "stream")
    cap_field = "max_completion_tokens" if given(body, "max_completion_tokens") else "max_tokens"
    cap = _output_cap(body)
    if cap_field != "max_tokens":
        body.pop("max_tokens", None)
    return Ask(
        body=body,
        model=model,
        size=len(raw),
        stream=stream,
        include_usage=read_include_usage(body),
        # Some servers draw more than they give, here too: vLLM once, TensorRT-LLM still.
        choices=max(read_count(body, field, MAX_CHOICES) or 1 for field in ("n", "best_of")),
        max_output_tokens=cap,
        end_user=read_end_user(body, end_user),
        tags=read_tags(tags),
        raw=raw,
        api="chat_completions",
        chat=body,
        cap_field=cap_field,
    )


def _output_cap(body: Body) -> int | None:
    """The newer name wins where a client sends both."""
    older = read_count(body, "max_tokens")
    newer = read_count(body, "max_completion_tokens")
    return older if newer is None else newer
