"""What a door asks of a request that is about to be answered, whoever answers it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class Answerable(Protocol):
    """An async context manager, read by ``events`` if ``streamed``, else by ``whole``."""

    @property
    def streamed(self) -> bool: ...

    @property
    def timeout_s(self) -> float:
        """How long it may take in all, but for a client that is slow to read."""
        ...

    @property
    def complete(self) -> bool: ...

    @property
    def client_left(self) -> bool: ...

    def left(self) -> None:
        """The client hung up."""
        ...

    def headers(self) -> list[tuple[str, str]]:
        """What the answer's head tells of it."""
        ...

    async def events(self) -> list[bytes]:
        """JSON of the events that came; none when it is time for a sign of life, or when the answer is ``complete``.

        Raises ApiError.
        """
        ...

    async def whole(self) -> bytes:
        """The JSON body. Raises ApiError."""
        ...

    async def __aenter__(self) -> Answerable: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None: ...
