"""Bodies that take long to read are read beside the event loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from worker.server.body import read


async def read_in(body: bytes) -> threading.Thread:
    """The thread in which a body is read."""
    return await read(body, lambda given: threading.current_thread() if given == body else threading.main_thread())


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {}},
        {"structured_outputs": {}},
        {"guided_json": {}},
        {"guided_regex": "a"},
        {"guided_choice": []},
        {"guided_grammar": ""},
        {"tool_choice": "required"},
        {"prompt": "word " * 2000},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_body_that_is_long_or_may_hold_a_grammar_does_not_hold_the_loop_up(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    assert await read_in(body) is not threading.current_thread()
    hidden = b'{"\\u%04x%b' % (body[2], body[3:])  # the first letter of its name as an escape
    assert json.loads(hidden) == fields
    assert await read_in(hidden) is not threading.current_thread()


async def test_a_short_body_waits_for_no_thread() -> None:
    assert await read_in(b'{"model": "m", "prompt": "Hi"}') is threading.current_thread()
