"""``POST /v1/responses``: told to backends as a chat completion, and kept for the requests that build upon it.

Reference: https://developers.openai.com/api/reference/resources/responses/methods/create
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

import msgspec

from gateway.answerable import Answerable
from gateway.ask import Ask, Body
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable
from gateway.http.client import Client
from gateway.http.inference import Reference
from gateway.http.openai import fields
from gateway.http.openai.door import OpenAIDoor
from gateway.http.openai.responses_reference import ResponseOperation
from gateway.long_work import worked
from gateway.responses.conversation import Origins, Stored, listed
from gateway.responses.keeping import KeptAnswer
from gateway.responses.store import ResponseStore
from gateway.tenants.principal import Principal
from gateway.translation.responses_answer import EVENT_PREFIX, Frame, ResponsesAnswer, response_id
from gateway.translation.responses_request import ResponsesRequest, read_request
from worker.protocol.errors import ApiError, bad_request, overloaded
from worker.protocol.sse import encode_event

RESPONSES = Reference("/v1/responses", ResponseOperation, "createResponse", "Create a response", "Responses")
_FALSE = msgspec.Raw(b"false")


class ResponsesDoor(OpenAIDoor):
    def __init__(
        self, request_id: UUID, client: Client, *, store: ResponseStore, clock: Clock, most_bytes: int
    ) -> None:
        """``most_bytes``: of a conversation, with all of its earlier turns."""
        super().__init__(request_id, client)
        self._store = store
        self._clock = clock
        self._most_bytes = most_bytes
        self._sequence = 0
        self._principal: Principal | None = None
        self._items: list[msgspec.Raw] = []
        self._origins: Origins | None = None
        self._kept = False

    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        body = await worked(len(raw), partial(fields.read_body, raw, "input"))
        model = fields.read_model(body)
        request = await worked(len(raw), partial(read_request, body))
        previous = await self._previous(request, principal)
        earlier = [] if previous is None else previous[1].conversation()
        size = len(raw) + sum(len(bytes(item)) for item in earlier)
        if size > self._most_bytes:
            raise self._too_long(request)
        chat = await worked(size, partial(request.chat, earlier))
        self._principal = principal
        end_user = fields.read_end_user(request.rest, self.client.text(fields.END_USER_HEADER))
        self._kept = request.store and self._store.keeps
        if self._kept:
            self._origins = self._store.origins(principal.tenant_id, end_user, previous)
            self._items = await worked(size, partial(listed, earlier, request.items, self.request_id.hex))
        echo = request.echo if self._kept else request.echo | {"store": _FALSE}
        frame = Frame(self.request_id.hex, model, self._now(), echo)
        return Ask(
            body=chat,
            model=model,
            size=max(len(raw), _size(chat)),
            stream=request.stream,
            include_usage=True,
            choices=1,
            max_output_tokens=request.max_output_tokens,
            end_user=end_user,
            tags=fields.read_tags(self.client.text(fields.TAGS_HEADER)),
            raw=raw,
            api="responses",
            chat=chat,
            from_chat=partial(ResponsesAnswer, frame, self._now),
            prompt_field="input",
            cap_field="max_output_tokens",
        )

    async def _previous(self, request: ResponsesRequest, principal: Principal) -> tuple[str, Stored] | None:
        """What to build upon, with its id. Raises ApiError (400, 503)."""
        previous = request.previous_response_id
        if previous is None:
            return None
        try:
            stored = await self._store.get(principal.tenant_id, previous)
        except DatabaseUnavailable as fault:
            raise services_away() from fault
        if stored is None:
            raise bad_request(
                f"Previous response with id {previous[:100]!r} not found. It may have expired, or was not stored; send "
                "the whole conversation as 'input' instead.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return previous, stored

    def _too_long(self, request: ResponsesRequest) -> ApiError:
        field = "input" if request.previous_response_id is None else "previous_response_id"
        return ApiError(
            413,
            f"The conversation has over {self._most_bytes} bytes, the most that is taken here. Begin a new one.",
            param=field,
            code="request_too_large",
        )

    def _now(self) -> int:
        return int(self._clock.now().timestamp())

    def event(self, data: bytes) -> bytes:
        self._sequence += 1
        begin = len(EVENT_PREFIX)
        return encode_event(data, event=data[begin : data.index(b'"', begin)])

    @property
    def last(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def error_event(self, error: ApiError) -> bytes:
        """With the fields of the reference, and once more in an ``error``: by that, OpenAI's SDKs know that they are to
        raise it."""
        body = error.body
        told = {
            "type": "error",
            "sequence_number": self._sequence,
            "code": body.code,
            "message": body.message,
            "param": body.param,
            "error": body,
        }
        return encode_event(msgspec.json.encode(told), event=b"error")

    def deliver(self, answer: Answerable) -> Answerable:
        if not self._kept:
            return answer
        return KeptAnswer(answer, response_id(self.request_id.hex), self._keep)

    async def _keep(self, response: msgspec.Raw) -> bool:
        assert self._principal is not None
        stored = Stored(response, self._items, self._origins)
        return await self._store.put(self._principal, response_id(self.request_id.hex), stored)


def services_away() -> ApiError:
    return overloaded(
        "The gateway cannot reach its own services at the moment. Try again shortly.", code="service_unavailable"
    )


def _size(body: Body) -> int:
    return sum(len(field) + len(bytes(value)) for field, value in body.items())
