"""Events as a stream of bytes that can be cut anywhere: each event after its length, four bytes, big-endian."""

from __future__ import annotations

from collections.abc import Iterable

_LENGTH_BYTES = 4


def frame(events: Iterable[bytes]) -> bytes:
    return b"".join(part for event in events for part in (len(event).to_bytes(_LENGTH_BYTES, "big"), event))


class Unframer:
    """Takes the stream in whatever pieces and gives the events that are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        held = self._held
        held += data
        found: list[bytes] = []
        at = 0
        while len(held) - at >= _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            end = begin + int.from_bytes(held[at:begin], "big")
            if end > len(held):
                break
            found.append(bytes(held[begin:end]))
            at = end
        del held[:at]
        return found

    @property
    def empty(self) -> bool:
        """Whether no part of an event is held."""
        return not self._held
