"""What hostile backends do, and what is to become of it: for the client, and in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tests.e2e.conformance import hostile_backend as says
from tests.e2e.conformance.hostile_backend import (
    DONE,
    FINISH,
    IS,
    PAR,
    ROLE,
    SAID,
    USAGE,
    Script,
    answers,
    sends,
    streams,
)

Mode = Literal["whole", "streamed"]
BOTH: Final[tuple[Mode, ...]] = ("whole", "streamed")
GZIP = "content-encoding: gzip\r\n"
PAGE = b"<html><body>Bad Gateway nginx</body></html>"
DEEP = b'{"choices":' + b"[" * 10_000 + b"]" * 10_000 + b"}"


@dataclass(frozen=True)
class Outcome:
    """``status``: of the answer's head. ``code``: of the ledger's row; None: all went well. ``text``: what the client
    got, whole or before a fault. ``prompt`` None: an estimate, whatever it is."""

    status: int = 200
    code: str | None = None
    text: str = "Paris"
    prompt: int | None = 9
    completion: int = 3
    cached: int = 0
    source: str = "backend"
    retry_after: str | None = None


@dataclass(frozen=True)
class Case:
    name: str
    send: Script
    outcome: Outcome
    modes: tuple[Mode, ...] = BOTH
    brand: str = "vllm"
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None


GOOD = Outcome()
ESTIMATED = Outcome(prompt=None, completion=2, source="estimated")


def refused(status: int, code: str, retry_after: str | None = None) -> Outcome:
    return Outcome(status, code, "", 0, 0, retry_after=retry_after)


def broken(code: str, text: str = "Paris", *, completion: int | None = None) -> Outcome:
    """In the middle of a stream: what was said is estimated, for its usage never came."""
    if completion is None:
        completion = {"Paris": 2, "Par": 1}[text]
    return Outcome(200, code, text, None, completion, source="estimated")


PROTOCOL, DISCONNECTED = refused(502, "backend_protocol_error"), refused(502, "backend_disconnected")
UNAUTHORIZED, NOT_FOUND = refused(502, "backend_unauthorized"), refused(502, "backend_not_found")
FAILED = refused(502, "backend_error")


def refusals() -> Iterator[Case]:
    """A status other than 200."""
    told = says.error("You are wrong.", "invalid_request_error", "bad_thing")
    for name, script, outcome in (
        ("status-400", answers(400, told), refused(400, "bad_thing")),
        ("status-400-page", answers(400, PAGE, media_type="text/html"), FAILED),
        ("status-400-empty", answers(400), FAILED),
        ("status-401", answers(401, told), UNAUTHORIZED),
        ("status-402", answers(402, told), UNAUTHORIZED),
        ("status-403", answers(403, told), UNAUTHORIZED),
        ("status-404", answers(404, told), NOT_FOUND),
        ("status-408", answers(408, told), refused(504, "backend_timeout")),
        ("status-409", answers(409, told), refused(409, "bad_thing")),
        ("status-413-page", answers(413, PAGE, media_type="text/html"), refused(413, "request_too_large")),
        (
            "status-422-list",
            answers(422, {"detail": [{"loc": ["body", "n"], "msg": "no"}]}),
            refused(422, "backend_error"),
        ),
        ("status-429", answers(429, told, more="retry-after: 7\r\n"), refused(429, "bad_thing", "7")),
        ("status-429-page", answers(429, PAGE), refused(503, "engine_overloaded")),
        ("status-500", answers(500, told), FAILED),
        ("status-502-page", answers(502, PAGE, media_type="text/html"), FAILED),
        ("status-503", answers(503, told), refused(503, "bad_thing")),
        ("status-504", answers(504, PAGE), refused(504, "backend_timeout")),
        ("status-529", answers(529, told), FAILED),
        ("status-204", answers(204), PROTOCOL),
        ("status-302", answers(302, more="location: http://127.0.0.1:1/\r\n"), PROTOCOL),
        ("error-null", answers(400, {"error": None}), FAILED),
        ("error-wild", answers(400, says.error("\ud800\0", 7, "a\0 b\ud800" * 99)), refused(400, ("a_b_" * 16)[:63])),
        ("error-endless", answers(400, says.error("x" * 2**20)), FAILED),
        ("error-lies-of-gzip", answers(400, told, more=GZIP), FAILED),
    ):
        yield Case(name, script, outcome)


def no_answers() -> Iterator[Case]:
    """Not even an answer, though its status be 200."""
    for name, script, outcome in (
        ("closes-at-once", sends(b""), DISCONNECTED),
        ("closes-in-the-head", sends(b"HTTP/1.1 200 OK\r\nconte"), DISCONNECTED),
        ("no-http", sends(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), PROTOCOL),
        ("page", answers(200, PAGE, media_type="text/html"), PROTOCOL),
        ("empty", answers(200), PROTOCOL),
        ("gzip-that-is-none", answers(200, says.completion(), more=GZIP), PROTOCOL),
        ("null", answers(200, None), PROTOCOL),
        ("list", answers(200, [1]), PROTOCOL),
        ("no-choices", answers(200, says.completion(choices=None)), PROTOCOL),
        ("half-a-body", answers(200, says.completion()[:-9]), PROTOCOL),
        ("deep", answers(200, DEEP), PROTOCOL),
        (
            "error-as-a-body",
            answers(200, says.error("Slow down.", "x", "rate_limit_exceeded")),
            refused(429, "rate_limit_exceeded"),
        ),
        (
            "length-that-is-not-kept",
            sends(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n{"),
            DISCONNECTED,
        ),
    ):
        yield Case(name, script, outcome)
    yield Case(
        "silent",
        says.says_nothing,
        refused(504, "backend_timeout"),
        first_byte_timeout_s=1.5,
    )


def endings() -> Iterator[Case]:
    """Streams that do not end as they should."""
    dead = says.event(says.error("The engine is dead.", "server_error", "engine_dead"))
    limited = says.event(says.error("Slow down.", "requests", "rate_limit_exceeded"))
    for name, script, outcome in (
        ("only-done", streams(DONE), PROTOCOL),
        ("only-a-head", streams(), DISCONNECTED),
        ("only-comments", streams(b": hi\n\n" * 3), DISCONNECTED),
        ("reset-before-content", streams(ROLE, ending="reset"), DISCONNECTED),
        ("error-first", streams(limited), refused(429, "rate_limit_exceeded")),
        ("error-behind-the-role", streams(ROLE, limited), refused(429, "rate_limit_exceeded")),
        ("error-unnamed-first", streams(b"event: error\ndata: oh no\n\n"), FAILED),
        ("error", streams(ROLE, PAR, dead, DONE), broken("engine_dead", "Par")),
        ("error-by-name", streams(ROLE, PAR, b"event: error\ndata: oh no\n\n"), broken("backend_error", "Par")),
        ("error-and-more", streams(ROLE, PAR, dead, IS, FINISH, USAGE, DONE), broken("engine_dead", "Par")),
        ("closed", streams(ROLE, PAR, ending="closed"), broken("backend_disconnected", "Par")),
        ("reset", streams(ROLE, PAR, ending="reset"), broken("backend_disconnected", "Par")),
        ("no-done", streams(*SAID), broken("backend_disconnected")),
        ("no-done-but-usage", streams(*SAID, USAGE), replace(GOOD, code="backend_disconnected")),
        ("half-an-event", streams(ROLE, PAR, IS[:-9]), broken("backend_disconnected", "Par")),
        ("not-json", streams(ROLE, PAR, b"data: oh no\n\n"), broken("backend_protocol_error", "Par")),
        ("list-event", streams(ROLE, PAR, b"data: [1]\n\n"), broken("backend_protocol_error", "Par")),
    ):
        yield Case(name, script, outcome, ("streamed",))
    yield Case(
        "falls-silent",
        streams(ROLE, PAR, ending="kept"),
        broken("backend_timeout", "Par"),
        ("streamed",),
        idle_timeout_s=1.5,
    )
    yield Case("no-done-of-a-brand-without", streams(*SAID, USAGE), GOOD, ("streamed",), brand="generic")
    yield Case(
        "no-reason-of-a-brand-without",
        streams(ROLE, PAR, IS),
        broken("backend_disconnected"),
        ("streamed",),
        brand="generic",
    )


def framings() -> Iterator[Case]:
    """Good streams, oddly put; and what is said around them."""
    odd = (*SAID, USAGE)
    many_lines = b"".join(piece.replace(b', "', b',\ndata: "') for piece in odd)
    for name, script in (
        ("byte-by-byte", streams(*odd, DONE, each=1)),
        ("at-once", streams(b"".join((*odd, DONE)))),
        ("crlf", streams(*(piece.replace(b"\n", b"\r\n") for piece in (*odd, DONE)), each=7)),
        ("cr", streams(*(piece.replace(b"\n", b"\r") for piece in (*odd, DONE)), each=5)),
        ("many-lines", streams(many_lines, DONE, each=11)),
        ("comments", streams(b": a\n\n", *(b":b\nid: 7\nretry: 9\n" + piece for piece in odd), DONE)),
        ("no-last-blank-line", streams(*odd, DONE.strip())),
        ("byte-order-mark", streams(b"\xef\xbb\xbf", *odd, DONE)),
        ("two-dones", streams(*odd, DONE, DONE)),
        ("talks-on", streams(*odd, DONE, PAR, says.event(says.error()), b"\xff\xfe")),
        ("breaks-behind-done", streams(*odd, DONE, ending="reset")),
        ("no-end-behind-done", streams(*odd, DONE, ending="kept")),
    ):
        yield Case(name, script, GOOD, ("streamed",))


def usages() -> Iterator[Case]:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    for name, fields, outcome in (
        ("cached-inside", details, replace(GOOD, cached=4)),
        ("more-cached-than-all", {"prompt_tokens_details": {"cached_tokens": 99}}, replace(GOOD, cached=9)),
        ("details-wild", {"prompt_tokens_details": [], "completion_tokens_details": "x"}, GOOD),
        ("zero", {"prompt": 0, "completion": 0}, replace(GOOD, prompt=0, completion=0)),
        ("as-floats", {"prompt": 9.0, "completion": 3.0}, GOOD),
        ("wild", {"prompt": -9, "completion": "3"}, ESTIMATED),
        ("beyond-reason", {"prompt": 10**30, "completion": 10**30}, ESTIMATED),
        ("as-truths", {"prompt": True, "completion": None}, ESTIMATED),
        ("output-untold", {"completion": None}, replace(ESTIMATED, prompt=9)),
        ("prompt-untold", {"prompt": "9"}, replace(ESTIMATED, completion=3)),
    ):
        for mode, script in zip(("streamed", "whole"), _told(**fields), strict=True):
            yield Case(f"usage-{name}", script, outcome, (mode,))  # type: ignore[arg-type]
    running = [says.chunk({"content": part}, usage=says.usage(9, at)) for at, part in enumerate(("Par", "is"), 1)]
    for name, script, outcome in (
        ("running", streams(ROLE, *running, FINISH, USAGE, DONE), GOOD),
        ("running-and-cut", streams(ROLE, *running), Outcome(200, "backend_disconnected", "Paris", 9, 2)),
        ("twice", streams(*SAID, USAGE, USAGE, DONE), GOOD),
        ("corrected", streams(*SAID, says.usage_chunk(900, 900), USAGE, DONE), GOOD),
        ("first", streams(USAGE, *SAID, DONE), GOOD),
        ("without-choices", streams(*SAID, says.event({"usage": says.usage()}), DONE), GOOD),
        ("in-the-choice", streams(ROLE, PAR, IS, says.chunk({}, "stop", usage=says.usage()), DONE), GOOD),
        ("never", streams(*SAID, DONE), ESTIMATED),
        (
            "null",
            streams(*SAID, says.usage_chunk().replace(json.dumps(says.usage()).encode(), b"null"), DONE),
            ESTIMATED,
        ),
        ("behind-done", streams(*SAID, DONE, USAGE), ESTIMATED),
    ):
        yield Case(f"usage-{name}", script, outcome, ("streamed",))
    for name, change in (("missing", {}), ("null", {"usage": None}), ("a-list", {"usage": [9, 3]})):
        body = json.loads(says.completion(**change))
        if not change:
            del body["usage"]
        yield Case(f"usage-{name}-whole", answers(200, body), replace(ESTIMATED, completion=2), ("whole",))


def _told(prompt: Any = 9, completion: Any = 3, **more: Any) -> tuple[Script, Script]:
    counts = says.usage(prompt, completion, **more)
    return streams(*SAID, says.chunk({}, choices=[], usage=counts), DONE), answers(200, says.completion(usage=counts))


def oddities() -> Iterator[Case]:
    """Ids and fields as no reference has them."""
    for name, fields in (
        ("empty-id", {"id": ""}),
        ("null-id", {"id": None}),
        ("wild-id", {"id": "\0\ud800"}),
        ("no-model", {"model": None}),
        ("another-model", {"model": "x" * 9999}),
        ("unknown-fields", {"nvext": {"a": [1.5, None]}, "object": "other"}),
    ):
        pieces = [says.chunk({"content": part}, finish, **fields) for part, finish in (("Par", None), ("is", "stop"))]
        yield Case(f"odd-{name}", streams(*pieces, USAGE, DONE), GOOD, ("streamed",))
        yield Case(f"odd-{name}-whole", answers(200, says.completion(**fields)), GOOD, ("whole",))
    for name, text in (("half-an-emoji", "Paris\ud83d"), ("zeros", "Pa\0ris"), ("separators", "Pa\u2028\x85\r\nris")):
        outcome = replace(GOOD, text=text.replace("\ud83d", "\ufffd"))
        chunk = says.chunk({"content": text}, "stop", logprob=float("-inf"))
        yield Case(f"odd-{name}", streams(ROLE, chunk, USAGE, DONE), outcome, ("streamed",))
        body = says.completion(text, logprob=float("nan"))
        yield Case(f"odd-{name}-whole", answers(200, body), outcome, ("whole",))
    for name, pieces in (
        ("no-role", (PAR, IS, FINISH)),
        ("nulls", (says.chunk({"content": None, "tool_calls": None, "refusal": None}), PAR, IS, FINISH)),
        ("no-delta", (PAR, IS, says.chunk({}, "stop", choices=[{"index": 0, "finish_reason": "stop"}]))),
        (
            "null-index",
            (
                *(says.chunk({}, choices=[{"index": None, "delta": {"content": part}}]) for part in ("Par", "is")),
                FINISH,
            ),
        ),
        ("null-delta", (PAR, IS, says.chunk({}, choices=[{"index": 0, "delta": None, "finish_reason": "stop"}]))),
        ("strange-reason", (PAR, IS, says.chunk({}, "eos_token"))),
        ("empty-chunks", (says.chunk({}), PAR, says.chunk({"content": ""}), IS, FINISH)),
    ):
        yield Case(f"odd-{name}", streams(*pieces, USAGE, DONE), GOOD, ("streamed",))


def anthropics() -> Iterator[Case]:
    """Anthropic's own API, in the same ways."""
    good = replace(GOOD, cached=4)
    overloaded = says.named(says.theirs_error("overloaded_error", "Overloaded"))
    said, end = says.TOLD, (says.DELTA, says.STOP)
    for name, script, outcome in (
        ("400", answers(400, says.theirs_error("invalid_request_error")), refused(400, "invalid_request_error")),
        ("401", answers(401, says.theirs_error("authentication_error")), UNAUTHORIZED),
        ("403", answers(403, says.theirs_error("permission_error")), UNAUTHORIZED),
        ("404", answers(404, says.theirs_error("not_found_error")), NOT_FOUND),
        ("413", answers(413, says.theirs_error("request_too_large")), refused(413, "request_too_large")),
        (
            "429",
            answers(429, says.theirs_error("rate_limit_error"), more="retry-after: 7\r\n"),
            refused(429, "rate_limit_error", "7"),
        ),
        ("500-page", answers(500, PAGE), FAILED),
        ("529", answers(529, says.theirs_error("overloaded_error")), refused(503, "overloaded_error", "1")),
        ("page", answers(200, PAGE, media_type="text/html"), PROTOCOL),
        ("not-json", answers(200, b"{"), PROTOCOL),
    ):
        yield Case(f"anthropic-{name}", script, outcome, brand="anthropic")
    cut = Outcome(200, "backend_disconnected", "Paris", 9, 2, 4, "estimated")
    for name, script, outcome in (
        ("stream", streams(*said, *end), good),
        ("byte-by-byte-crlf", streams(*(piece.replace(b"\n", b"\r\n") for piece in (*said, *end)), each=1), good),
        ("overloaded-first", streams(overloaded), refused(503, "overloaded_error", "1")),
        ("overloaded-behind-start", streams(says.START, overloaded), Outcome(503, "overloaded_error", "", 9, 1, 4)),
        ("overloaded-later", streams(*said, overloaded), replace(cut, code="overloaded_error")),
        ("cut", streams(*said), cut),
        ("reset", streams(*said, ending="reset"), cut),
        ("no-stop", streams(*said, says.DELTA), replace(good, code="backend_disconnected")),
        ("stop-first", streams(says.STOP), PROTOCOL),
        ("garbage", streams(*said, b"event: ping\ndata: x\n\n"), replace(cut, code="backend_protocol_error")),
        ("running-usage", streams(*said, says.message_delta(output_tokens=2), *end), good),
        ("usage-repeated", streams(*said, says.message_delta(**says.WHOLE_USAGE), says.STOP), good),
        (
            "usage-of-cache-written",
            streams(*said, says.message_delta(cache_creation_input_tokens=20), says.STOP),
            replace(good, prompt=29),
        ),
        (
            "no-usage",
            streams(says.message_start(usage=None), *said[1:], says.message_delta(output_tokens=None), says.STOP),
            ESTIMATED,
        ),
        (
            "half-an-emoji",
            streams(*said[:2], says.block_delta("Paris\ud83d"), says.BLOCK_END, *end),
            replace(good, text="Paris\ufffd"),
        ),
        ("wild-id", streams(says.message_start(id="\ud83d\0", x=float("nan")), *said[1:], *end), good),
        ("empty-id", streams(says.message_start(id=""), *said[1:], *end), good),
        ("unknown-events", streams(*said, says.named({"type": "later_thing"}), *end), good),
        ("talks-on", streams(*said, *end, overloaded), good),
    ):
        yield Case(f"anthropic-{name}", script, outcome, ("streamed",), brand="anthropic")
    for name, body, outcome in (
        ("whole", says.whole_message(), good),
        (
            "whole-half-an-emoji",
            says.whole_message(content=[{"type": "text", "text": "Paris\ud83d"}]),
            replace(good, text="Paris\ufffd"),
        ),
        ("whole-wild-id", says.whole_message(id="\ud83d\0", x=float("nan")), good),
        ("whole-empty-id", says.whole_message(id=""), good),
        (
            "whole-error",
            json.dumps(says.theirs_error("overloaded_error")).encode(),
            refused(503, "overloaded_error", "1"),
        ),
        ("whole-no-usage", says.whole_message(usage=None), ESTIMATED),
        ("whole-negative-usage", says.whole_message(usage={"input_tokens": -1, "output_tokens": -1}), ESTIMATED),
    ):
        yield Case(f"anthropic-{name}", answers(200, body), outcome, ("whole",), brand="anthropic")


CASES: Final = [
    *refusals(),
    *no_answers(),
    *endings(),
    *framings(),
    *usages(),
    *oddities(),
    *anthropics(),
]
