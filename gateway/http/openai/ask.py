"""Reads a chat completion request: what the gateway must know of it is checked here, the rest is the worker's."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.ask import Ask, Body, given
from worker.protocol.errors import bad_request

MAX_CHOICES = 128
MAX_MODEL_NAME = 256
MAX_END_USER = 512
"""Characters of what a client calls its own user."""
MAX_TAGS = 10
MAX_TAG = 64
END_USER_HEADER = "x-penstock-end-user"
TAGS_HEADER = "x-penstock-tags"
MAX_BESIDE_MESSAGES = 1024 * 1024
"""Most bytes of a body that are not its messages: each field there becomes a Python object."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Longest(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


_longest_decoder = msgspec.json.Decoder(_Longest)


def parse_chat(raw: bytes, *, end_user: str | None = None, tags: str | None = None) -> Ask:
    """``end_user``, ``tags``: what the headers of these names say.

    Takes time in proportion to the bytes, not to the values in them. Raises ApiError (400) that names the field and
    the remedy.
    """
    body = _object(raw)
    model = _value(body, "model")
    if not isinstance(model, str) or not model:
        raise bad_request("'model' must be the name of a model; GET /v1/models lists them.", param="model")
    if len(model) > MAX_MODEL_NAME:
        raise bad_request(f"'model' must have at most {MAX_MODEL_NAME} characters.", param="model")
    messages = bytes(body.get("messages", b""))
    if not messages.startswith(b"[") or not messages[1:-1].strip():
        raise bad_request("'messages' must be a list with at least one message.", param="messages")
    stream = _value(body, "stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", param="stream")
    cap_field = "max_completion_tokens" if given(body, "max_completion_tokens") else "max_tokens"
    cap = _output_cap(body)
    if cap_field != "max_tokens":
        body.pop("max_tokens", None)
    return Ask(
        body=body,
        model=model,
        size=len(raw),
        stream=bool(stream),
        include_usage=_include_usage(body),
        choices=_count(body, "n", MAX_CHOICES) or 1,
        max_output_tokens=cap,
        end_user=_end_user(body, end_user),
        tags=read_tags(tags),
        raw=raw,
        api="chat_completions",
        chat=body,
        cap_field=cap_field,
    )


def read_tags(header: str | None) -> tuple[str, ...]:
    """A header's tags, sorted, each once: ``name`` or ``name=value``, with commas between. Raises ApiError (400)."""
    tags = sorted({tag for part in (header or "").split(",") if (tag := part.strip())})
    if len(tags) > MAX_TAGS:
        raise bad_request(f"The header '{TAGS_HEADER}' has {len(tags)} tags. At most {MAX_TAGS} are allowed.")
    for tag in tags:
        if len(tag) > MAX_TAG or not tag.isprintable():
            raise bad_request(
                f"The header '{TAGS_HEADER}' has a tag that is longer than {MAX_TAG} characters, or has some that "
                "cannot be printed. Shorten or clean it; commas stand between tags."
            )
    return tuple(tags)


def _object(raw: bytes) -> Body:
    if not raw.strip():
        raise bad_request("The body is empty. Send a JSON object with 'model' and 'messages'.")
    try:
        beside_messages = len(raw) - len(bytes(_longest_decoder.decode(raw).messages))
        if beside_messages > MAX_BESIDE_MESSAGES:
            raise bad_request(f"The body has over {MAX_BESIDE_MESSAGES} bytes beside its 'messages'. Leave some out.")
        if not raw.isascii():
            raw.decode()
        return _decoder.decode(raw)
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.") from None
    except msgspec.DecodeError as fault:
        raise bad_request(f"The body is not valid JSON: {fault}.") from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.") from None


def _value(body: Body, field: str) -> Any:
    try:
        return msgspec.json.decode(body.get(field, b"null"))
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"'{field}' cannot be read.", param=field) from None


def _count(body: Body, field: str, most: int | None = None) -> int | None:
    value = _value(body, field)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        what = f"an integer from 1 to {most}" if most is not None else "an integer of at least 1"
        raise bad_request(f"'{field}' must be {what}.", param=field)
    return value


def _output_cap(body: Body) -> int | None:
    """The newer name wins where a client sends both."""
    older = _count(body, "max_tokens")
    newer = _count(body, "max_completion_tokens")
    return older if newer is None else newer


def _include_usage(body: Body) -> bool:
    options = _value(body, "stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request("'stream_options' must be an object.", param="stream_options")
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise bad_request("'stream_options.include_usage' must be true or false.", param="stream_options.include_usage")
    return bool(include_usage)


def _end_user(body: Body, header: str | None) -> str | None:
    """The header wins over ``safety_identifier``, which wins over the older ``user``."""
    named: list[tuple[str, str | None, Any]] = [(f"The header '{END_USER_HEADER}'", None, header)]
    named += [(f"'{field}'", field, _value(body, field)) for field in ("safety_identifier", "user")]
    chosen = None
    for what, field, value in named:
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{what} must be text.", param=field)
        if value is not None and len(value) > MAX_END_USER:
            raise bad_request(f"{what} has {len(value)} characters. At most {MAX_END_USER} are allowed.", param=field)
        chosen = chosen or value
    return chosen or None
