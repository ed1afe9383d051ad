"""What OpenAI's APIs have in common: how events and errors stand on the wire."""

from __future__ import annotations

from uuid import UUID

from gateway.answerable import Answerable
from gateway.http.client import Client
from gateway.http.inference import KEEP_ALIVE
from worker.protocol.errors import ApiError
from worker.protocol.sse import DONE, encode_event

_DONE = encode_event(DONE)


class OpenAIDoor:
    def __init__(self, request_id: UUID, client: Client) -> None:
        self.request_id = request_id
        self.client = client

    @property
    def headers(self) -> list[tuple[str, str]]:
        return []

    def event(self, data: bytes) -> bytes:
        return encode_event(data)

    @property
    def last(self) -> bytes:
        return _DONE

    @property
    def sign_of_life(self) -> bytes:
        return KEEP_ALIVE

    def status(self, error: ApiError) -> int:
        return error.status

    def error(self, error: ApiError) -> bytes:
        return error.encode()

    def error_event(self, error: ApiError) -> bytes:
        return encode_event(error.encode())

    def deliver(self, answer: Answerable) -> Answerable:
        return answer
