"""What an answer repeats of its request, though it doesn't hang on it: of a kept answer, another request's words."""

from __future__ import annotations

from typing import Final

import msgspec

_NULL: Final = msgspec.Raw(b"null")
_ECHOED: Final = {"metadata": msgspec.Raw(b"{}"), "user": _NULL, "safety_identifier": _NULL}
"""Fields, and what stands there if the request says nothing."""
_QUOTED: Final = tuple(f'"{name}"'.encode() for name in _ECHOED)
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_echo_of(request: bytes, answer: bytes) -> bytes:
    """The answer, repeating the ``request``'s words instead of those that it was made for. Both JSON."""
    if not any(quoted in answer for quoted in _QUOTED):
        return answer
    try:
        told = _decoder.decode(answer)
        names = [name for name in _ECHOED if name in told]
        if not names:
            return answer
        asked = _decoder.decode(request)
    except (msgspec.DecodeError, RecursionError):
        return answer
    for name in names:
        value = asked.get(name, _NULL)
        told[name] = _ECHOED[name] if value == _NULL else value
    return msgspec.json.encode(told)
