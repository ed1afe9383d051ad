"""Tries a backend as a request would use it, step by step, and says what to mend.

No step's words hold a secret: what a backend answers is masked, and an answer about access is not shown at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from gateway.apis import Api, Family
from gateway.backends.backend import Backend, Order
from gateway.backends.brands import BRANDS
from gateway.backends.faults import BackendFault
from gateway.backends.transport import Reply, Transport
from gateway.billing.usage import TokenUsage
from gateway.ids import uuid7
from gateway.routing.route import Endpoint
from worker.protocol.errors import ApiError

STEP_S: Final = 30.0
TOTAL_S: Final = 90.0
CONNECT_S: Final = 5.0
OUTPUT_TOKENS: Final = 16
"""Fewer are an error to some models that reason before they speak."""
_LONGEST_LIST: Final = 8 * 1024 * 1024
_LONGEST_ERROR: Final = 64 * 1024
_LONGEST_DETAIL: Final = 300
_SHORTEST_SECRET: Final = 8
"""Characters: shorter values of headers are words that may stand anywhere."""
_MESSAGES: Final = msgspec.Raw(b'[{"role":"user","content":"Say hi."}]')


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    passed: bool
    detail: str
    """What was found; of one that failed, what is wrong and what to do."""
    ms: int


class _Failed(Exception):
    """A step failed; ``final``: those behind it would fail for the same reason."""

    def __init__(self, detail: str, *, final: bool = False) -> None:
        super().__init__(detail)
        self.final = final


class Trials:
    """``backends``: how each family is spoken to."""

    def __init__(
        self,
        transport: Transport,
        backends: Mapping[Family, Backend],
        *,
        step_s: float = STEP_S,
        total_s: float = TOTAL_S,
    ) -> None:
        self._transport = transport
        self._backends = backends
        self._step_s = step_s
        self._total_s = total_s

    async def steps(
        self, endpoint: Endpoint, *, model: str | None = None, embeddings: bool = False
    ) -> AsyncIterator[Step]:
        """Each as it is done, all within ``total_s`` seconds. ``model``: None: the backend's own, else the first that
        it lists. After a failure that all others would share there are no more."""
        trial = _Trial(self._transport, self._backends[endpoint.family], endpoint, model)
        todo: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("connect", trial.connect),
            ("models", trial.models),
            ("chat", trial.whole_chat),
            ("stream", trial.streamed_chat),
        ]
        if embeddings:
            todo.append(("embeddings", trial.embeddings))
        loop = asyncio.get_running_loop()
        end = loop.time() + self._total_s
        for name, work in todo:
            began = loop.time()
            final = False
            try:
                async with asyncio.timeout(max(0.0, min(self._step_s, end - began))):
                    passed, detail = True, await work()
            except TimeoutError:
                passed, final = False, name == "connect"
                detail = (
                    f"no answer within {loop.time() - began:.0f} s; see whether the server is busy or still loads its "
                    "model, then try again"
                )
            except _Failed as fault:
                passed, detail, final = False, str(fault), fault.final
            yield Step(name, passed, trial.clean(detail), round((loop.time() - began) * 1000))
            if final:
                return


class _Trial:
    def __init__(self, transport: Transport, backend: Backend, endpoint: Endpoint, model: str | None) -> None:
        self._transport = transport
        self._backend = backend
        self._endpoint = endpoint
        self._model = model or endpoint.sends_model

    def clean(self, text: str) -> str:
        """``text`` in one line without the backend's secrets, should it have repeated them."""
        for value in self._endpoint.headers.values():
            for secret in (value, value.rpartition(" ")[2]):
                if len(secret) >= _SHORTEST_SECRET:
                    text = text.replace(secret, "***")
        text = "".join(c if c.isprintable() else " " for c in text)
        return text if len(text) <= _LONGEST_DETAIL else text[: _LONGEST_DETAIL - 3] + "..."

    async def connect(self) -> str:
        parts = urlsplit(self._endpoint.base_url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                resolved = loop.time()
                context = ssl.create_default_context() if secure else None
                _, writer = await asyncio.open_connection(host, port, ssl=context)
        except TimeoutError:
            remedy = "see whether a firewall lies between"
            if secure:
                remedy += ", or whether base_url should begin with http"
            raise _Failed(f"{host}:{port} does not answer within {CONNECT_S:g} s; {remedy}", final=True) from None
        except socket.gaierror:
            raise _Failed(
                f"the name {host} cannot be resolved; check base_url, and this machine's DNS", final=True
            ) from None
        except ssl.SSLError as fault:
            raise _Failed(_tls_remedy(host, fault), final=True) from None
        except (OSError, UnicodeError) as fault:
            reason = getattr(fault, "strerror", None) or type(fault).__name__
            raise _Failed(
                f"{host}:{port} cannot be reached ({reason}); is the server up, and host and port of base_url right?",
                final=True,
            ) from None
        connected = loop.time()
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await writer.wait_closed()
        address = found[0][4][0]
        how = "connected with TLS" if secure else "connected"
        named = host if host == address else f"{host} is {address} ({_ms(resolved - began)})"
        return f"{named}, {how} ({_ms(connected - resolved)})"

    async def models(self) -> str:
        brand = BRANDS[self._endpoint.brand]
        _, headers = self._backend.probe(self._endpoint)
        # Anthropic's API lists twenty unless told otherwise.
        query = "?limit=1000" if brand.family == "anthropic" else ""
        url = f"{self._endpoint.base_url}{brand.prefix}/models{query}"
        try:
            reply = await self._transport.get(url, headers=headers, connect_s=CONNECT_S)
            try:
                body = await reply.read_limited(_LONGEST_LIST)
            finally:
                reply.close()
        except BackendFault as fault:
            raise _Failed(f"asked for its models, {_said(fault)}") from None
        if reply.status in (404, 405, 501):
            return f"it does not list models (status {reply.status}), which is no fault if the chat works"
        if reply.status != 200:
            raise self._refused(reply, body)
        names = _model_names(body or b"")
        if names is None:
            raise _Failed("what it lists are no models; check that base_url leads to the API, not to a web page")
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        if self._model is None:
            if not names:
                raise _Failed("it lists no model; load one, or name one with --model", final=True)
            self._model = names[0]
            return f"lists {shown}; {self._model} is tried"
        if self._model in names or f"models/{self._model}" in names:
            return f"lists {self._model}"
        return f"does not list {self._model}, which may yet be known by that name; it lists {shown or 'none'}"

    async def whole_chat(self) -> str:
        return await self._ask("chat_completions", {"messages": _MESSAGES}, "answered whole")

    async def streamed_chat(self) -> str:
        body = {"messages": _MESSAGES, "stream": msgspec.Raw(b"true")}
        return await self._ask("chat_completions", body, "streamed")

    async def embeddings(self) -> str:
        if "embeddings" not in self._endpoint.apis:
            raise _Failed("servers of this kind have no embeddings")
        return await self._ask("embeddings", {"input": msgspec.Raw(b'"hi"')}, "answered")

    async def _ask(self, api: Api, body: dict[str, msgspec.Raw], how: str) -> str:
        if self._model is None:
            raise _Failed("which model is not known; name one with --model")
        endpoint, model = self._endpoint, self._model
        order = _order(api, body, model, endpoint.context_length)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            outgoing = self._backend.outgoing(order, endpoint, model)
            reply = await self._transport.post(
                outgoing.url, headers=outgoing.headers, body=outgoing.body, connect_s=CONNECT_S
            )
            try:
                return f"{how}: {await self._read(order, reply, began)}"
            finally:
                reply.close()
        except BackendFault as fault:
            raise _Failed(_said(fault)) from None
        except ApiError as fault:
            raise _Failed(f"cannot be asked so: {fault.body.message}") from None

    async def _read(self, order: Order, reply: Reply, began: float) -> str:
        loop = asyncio.get_running_loop()
        if reply.status != 200:
            raise self._refused(reply, await reply.read_limited(_LONGEST_ERROR))
        reader = self._backend.reader(order, self._endpoint, reply.media_type)
        usage: TokenUsage | None = None
        events, first = 0, None
        while True:
            chunk = await reply.read_some()
            reading = reader.feed(chunk) if chunk else reader.end()
            usage = reading.usage or usage
            events += len(reading.events)
            if events and first is None:
                first = loop.time() - began
            if reading.fault is not None:
                raise reading.fault
            if reading.complete:
                break
            if not chunk:
                raise _Failed("the answer ended before it was complete")
        told = "usage is not told and will be estimated"
        if usage is not None and usage.source == "backend":
            told = f"usage told: {usage.prompt_tokens} tokens in, {usage.completion_tokens} out"
        if order.streamed:
            return f"{events} events, the first after {_ms(first or 0.0)}; {told}"
        return told

    def _refused(self, reply: Reply, body: bytes | None) -> _Failed:
        return _refused(
            reply.status, self._backend.refusal(self._endpoint, reply.status, body, reply.header("retry-after"))
        )


def _order(api: Api, body: dict[str, msgspec.Raw], model: str, context_length: int) -> Order:
    capped = api != "embeddings"
    return Order(
        request_id=str(uuid7()),
        model=model,
        targets=(),
        context_length=context_length,
        body=body,
        streamed="stream" in body,
        include_usage=True,
        output_cap=OUTPUT_TOKENS if capped else None,
        clamp_output=capped,
        salt="",
        tenant="",
        prompt_bytes=len(b"".join(body.values())),
        output_tokens=OUTPUT_TOKENS if capped else 0,
        api=api,
        chat=body if capped else None,
    )


def _refused(status: int, fault: BackendFault) -> _Failed:
    if status == 402:
        return _Failed("status 402: the account has no credit; pay, or take another key", final=True)
    if status == 403:
        return _Failed("status 403: the API key is not allowed this; see its permissions, and the account's region")
    # Not every brand says so by its status: Google calls a wrong key a bad request.
    if status == 401 or fault.code == "backend_unauthorized":
        return _Failed(f"status {status}: the API key is missing or not valid; set it anew with --api-key", final=True)
    said = f", and says: {fault.error().body.message}"
    if status in (404, 405):
        return _Failed(f"status {status}: there is no such model, or no such path; check --model and base_url's path")
    if 300 <= status < 400:
        return _Failed(f"status {status}: it leads elsewhere, where no key is sent; set base_url to where the API is")
    if status == 429:
        return _Failed(f"status 429: the account's limit is reached, or its credit used up{said}")
    if status >= 500:
        return _Failed(f"status {status}: the server fails; its own log says why{said}")
    return _Failed(f"status {status}: it does not take such a request; see whether brand and model are right{said}")


def _said(fault: BackendFault) -> str:
    if fault.unreachable:
        return "it cannot be reached any more; see whether the server still runs"
    if fault.code == "backend_disconnected":
        return "it broke off; see the server's own log, and whether base_url should begin with https"
    if fault.code == "backend_protocol_error":
        return f"it did not answer as its brand does ({fault.message}); check brand and base_url"
    return f"it failed with {fault.code}: {fault.error().body.message}"


def _tls_remedy(host: str, fault: ssl.SSLError) -> str:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {host} is not trusted ({fault.verify_message}); let it present its whole chain, or "
            "name your authority's file in SSL_CERT_FILE"
        )
    return f"no TLS with {host} ({fault.reason or 'handshake failed'}); base_url may have to begin with http"


def _model_names(body: bytes) -> list[str] | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    entries = value.get("data") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        return None
    return [each["id"] for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
