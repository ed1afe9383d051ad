"""A logged request asked again through a gateway's own door, and both answers side by side."""

from __future__ import annotations

import shutil
import textwrap
import time
from itertools import zip_longest
from typing import Any, Final

import click
import httpx
import msgspec

from gateway.apis import Api
from gateway.assembly import describe
from gateway.billing.usage import usd_text
from gateway.cli.values import printable
from gateway.promptlog.entry import Asked, Logged

_PATHS: Final[dict[Api, str]] = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_TIMEOUT_S: Final = 3600.0
_NARROWEST: Final = 40


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    model: str
    backend: str | None
    charged_usd: str | None
    total_ms: int | None
    text: str


def again(asked: Asked, url: str, key: str, model: str | None) -> Answer:
    """Ask a gateway, which answers whole, without its cache. Raises click.ClickException."""
    body, model = _body(asked, model), model or asked.model
    headers = {"authorization": f"Bearer {key}", "x-penstock-cache": "off"}
    if asked.api == "messages":
        headers["anthropic-version"] = "2023-06-01"
    began = time.monotonic()
    try:
        answer = httpx.post(
            url.rstrip("/") + _PATHS[asked.api],
            json=body | {"model": model},
            headers=headers,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=5.0),
        )
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise click.ClickException(
            f"no gateway answers at {url}: {type(fault).__name__}. Start one, or name another by --url"
        ) from fault
    if answer.status_code != 200:
        raise click.ClickException(f"the gateway refused it with {answer.status_code}: {printable(answer.text[:1000])}")
    return Answer(
        model=model,
        backend=answer.headers.get("x-penstock-backend"),
        charged_usd=answer.headers.get("x-penstock-cost-usd"),
        total_ms=round((time.monotonic() - began) * 1000),
        text=_text(asked.api, answer.content),
    )


def before(logged: Logged) -> Answer:
    """What was answered then, as it was logged."""
    facts = logged.facts
    return Answer(
        model=facts.model,
        backend=facts.backend,
        charged_usd=usd_text(facts.charged_nano_usd),
        total_ms=facts.total_ms,
        text="(no answer was logged)" if logged.response is None else _text(facts.api, logged.response),
    )


def side_by_side(then: Answer, now: Answer) -> str:
    width = max(_NARROWEST, (shutil.get_terminal_size().columns - 3) // 2)
    left, right = (_column(title, each, width) for title, each in (("THEN", then), ("NOW", now)))
    rows = zip_longest(left, right, fillvalue="")
    return "\n".join(f"{one.ljust(width)} | {other}".rstrip() for one, other in rows)


def _column(title: str, answer: Answer, width: int) -> list[str]:
    facts = [
        f"{answer.model} at {answer.backend or '-'}",
        f"{answer.charged_usd or '-'} USD, {answer.total_ms or '-'} ms",
    ]
    lines = [title, *facts, "", *answer.text.splitlines()]
    return [part for line in lines for part in textwrap.wrap(printable(line), width) or [""]]


def _body(asked: Asked, model: str | None) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(asked.body, type=dict[str, Any])
    except msgspec.DecodeError as fault:
        raise click.ClickException(f"the request was no JSON object: {fault}") from fault
    for field in ("stream", "stream_options"):
        body.pop(field, None)
    if asked.api == "responses":
        body["store"] = False
    return body


def _text(api: Api, body: bytes) -> str:
    return describe(api, body).text or body.decode(errors="replace")[:2000]
