"""What OpenAI's requests for inference have in common, read field by field: what the gateway must know is checked, the
rest is the backend's."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from gateway.ask import Body
from gateway.http.openai.closed_fields import check_fields
from worker.protocol.errors import bad_request

MAX_CHOICES: Final = 128
MAX_MODEL_NAME: Final = 256
MAX_END_USER: Final = 512
"""Characters of what a client calls its own user."""
MAX_TAGS: Final = 10
MAX_TAG: Final = 64
END_USER_HEADER: Final = "x-penstock-end-user"
TAGS_HEADER: Final = "x-penstock-tags"
MAX_BESIDE_PROMPT: Final = 1024 * 1024
"""Most bytes of a body that are not its prompt: each field there becomes a Python object."""

INCLUDE_USAGE: Final = "include_usage"

_NULL: Final = msgspec.Raw(b"null")
_EMPTY_LIST: Final = re.compile(rb"\[\s*\]")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def _prompt_decoder(field: str) -> msgspec.json.Decoder[Any]:
    """Finds that field alone, wherever it stands."""
    prompt = ("prompt", msgspec.Raw, msgspec.field(name=field, default=msgspec.Raw(b"null")))
    return msgspec.json.Decoder(msgspec.defstruct("Prompt", [prompt]))


_prompt_decoders: Final = {field: _prompt_decoder(field) for field in ("messages", "prompt", "input")}


def read_body(raw: bytes, prompt_field: str) -> Body:
    """``prompt_field``: where the prompt stands, ``messages``, ``prompt`` or ``input``.

    Takes time in proportion to the bytes, not to the values in them. Raises ApiError (400).
    """
    if not raw.strip():
        raise bad_request(f"The body is empty. Send a JSON object with 'model' and '{prompt_field}'.")
    try:
        if len(raw) > MAX_BESIDE_PROMPT:
            _check_beside(raw, prompt_field)
        if not raw.isascii():
            raw.decode()
        body = _decoder.decode(raw)
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.") from None
    except msgspec.DecodeError as fault:
        raise bad_request(f"The body is not valid JSON: {fault}.") from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.") from None
    check_fields(body)
    return body


def _check_beside(raw: bytes, prompt_field: str) -> None:
    beside = len(raw) - len(bytes(_prompt_decoders[prompt_field].decode(raw).prompt))
    if beside > MAX_BESIDE_PROMPT:
        raise bad_request(f"The body has over {MAX_BESIDE_PROMPT} bytes beside its '{prompt_field}'. Leave some out.")


def read_value(body: Body, field: str) -> Any:
    """A text, a number, true, false or None; an object or a list stays the JSON it is, for there may be a million
    values in it. Raises ApiError (400), as all that reads a field."""
    raw = body.get(field)
    if raw is None:
        return None
    if memoryview(raw)[0] in b"{[":
        return raw
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise bad_request(f"'{field}' cannot be read.", param=field) from None


def read_object(body: Body, field: str) -> Body:
    """Its fields; none if it is not there."""
    raw = body.get(field)
    if raw is None:
        return {}
    try:
        return _object_decoder.decode(raw) or {}
    except msgspec.DecodeError:
        raise bad_request(f"'{field}' must be an object.", param=field) from None


def check_messages(body: Body) -> None:
    messages = body.get("messages", _NULL)
    if memoryview(messages)[0] != ord("[") or _EMPTY_LIST.fullmatch(messages):
        raise bad_request("'messages' must be a list with at least one message.", param="messages")


def read_model(body: Body) -> str:
    model = read_value(body, "model")
    if not isinstance(model, str) or not model:
        raise bad_request("'model' must be the name of a model; GET /v1/models lists them.", param="model")
    if len(model) > MAX_MODEL_NAME:
        raise bad_request(f"'model' must have at most {MAX_MODEL_NAME} characters.", param="model")
    return model


def read_flag(body: Body, field: str) -> bool:
    value = read_value(body, field)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"'{field}' must be true or false.", param=field)
    return bool(value)


def read_count(body: Body, field: str, most: int | None = None, *, least: int = 1) -> int | None:
    value = read_value(body, field)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        what = f"an integer from {least} to {most}" if most is not None else f"an integer of at least {least}"
        raise bad_request(f"'{field}' must be {what}.", param=field)
    return value


def read_include_usage(body: Body) -> bool:
    options = read_object(body, "stream_options")
    for name in options:
        if name != INCLUDE_USAGE and name.casefold() == INCLUDE_USAGE:  # see ``closed_fields``
            raise bad_request(f"Unknown parameter: 'stream_options.{name}'.", param="stream_options")
    include_usage = read_value(options, INCLUDE_USAGE)
    if include_usage is not None and not isinstance(include_usage, bool):
        raise bad_request("'stream_options.include_usage' must be true or false.", param="stream_options.include_usage")
    return bool(include_usage)


def read_end_user(body: Body, header: str | None) -> str | None:
    """The header wins over ``safety_identifier``, which wins over the older ``user``."""
    if header is None and "safety_identifier" not in body and "user" not in body:
        return None
    named: list[tuple[str, str | None, Any]] = [(f"The header '{END_USER_HEADER}'", None, header)]
    named += [(f"'{field}'", field, read_value(body, field)) for field in ("safety_identifier", "user")]
    chosen = None
    for what, field, value in named:
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{what} must be text.", param=field)
        if value is not None and len(value) > MAX_END_USER:
            raise bad_request(f"{what} has {len(value)} characters. At most {MAX_END_USER} are allowed.", param=field)
        chosen = chosen or value
    return chosen or None


def read_tags(header: str | None) -> tuple[str, ...]:
    """A header's tags, sorted, each once: ``name`` or ``name=value``, with commas between. Raises ApiError (400)."""
    if not header:
        return ()
    tags = sorted({tag for part in header.split(",") if (tag := part.strip())})
    if len(tags) > MAX_TAGS:
        raise bad_request(f"The header '{TAGS_HEADER}' has {len(tags)} tags. At most {MAX_TAGS} are allowed.")
    for tag in tags:
        if len(tag) > MAX_TAG or not tag.isprintable():
            raise bad_request(
                f"The header '{TAGS_HEADER}' has a tag that is longer than {MAX_TAG} characters, or has some that "
                "cannot be printed. Shorten or clean it; commas stand between tags."
            )
    return tuple(tags)
