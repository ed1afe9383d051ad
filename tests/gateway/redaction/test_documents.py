"""JSON stays JSON of the same form, with its texts blacked out."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.redaction import Redactor
from tests.gateway.redaction.cases import ALONE, JWT, PEM, WHOLE

CARD = 4111111111111111
PICTURE = base64.b64encode(bytes(range(256)) * 3).decode()


def redacted(value: Any, *, ascii_only: bool = True) -> Any:
    return json.loads(Redactor().json(json.dumps(value, ensure_ascii=ascii_only).encode()))


def test_texts_are_blacked_out_and_the_rest_stays() -> None:
    request = {
        "model": "gpt-5",
        "temperature": 1.0,
        "max_tokens": 4096,
        "seed": 12345678901234567890,
        "stream": True,
        "user": None,
        "messages": [
            {"role": "system", "content": "Übersetze alles, 世界!"},
            {"role": "user", "content": [{"type": "text", "text": f"Mail jane@example.com, card {CARD}\n{PEM}"}]},
        ],
        "metadata": {"jane@example.com": "+49 30 901820"},
    }
    expected: Any = json.loads(json.dumps(request))
    expected["messages"][1]["content"][0]["text"] = "Mail [EMAIL], card [CARD]\n[PRIVATE_KEY]"
    expected["metadata"] = {"jane@example.com": "[PHONE]"}
    assert redacted(request) == redacted(request, ascii_only=False) == expected


def test_counts_are_of_all_that_was_found() -> None:
    redactor = Redactor()
    redactor.json(
        json.dumps({"a": "x@example.com y@example.com", "b": [CARD, JWT], "c": {"password": "open"}}).encode()
    )
    assert redactor.counts == {"EMAIL": 2, "CARD": 1, "TOKEN": 1, "SECRET": 1}


def test_json_in_texts_stays_json_down_to_the_fourth() -> None:
    value: Any = {"card": CARD, "mail": "jane@example.com", "n": 1.0}
    expected: Any = {"card": "[CARD]", "mail": "[EMAIL]", "n": 1.0}
    for depth in range(4):
        value, expected = {"arguments": json.dumps(value)}, {"arguments": expected}
        found = redacted(value)
        for _ in range(depth + 1):
            found = found["arguments"]
            found = json.loads(found) if isinstance(found, str) else found
        inner = expected
        while "arguments" in inner:
            inner = inner["arguments"]
        assert found == inner


def test_json_in_a_text_that_holds_nothing_stays_as_it_was_written() -> None:
    written = '{ "city" : "Zürich", "days":1.0 }'
    assert redacted({"arguments": written}) == {"arguments": written}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"password": "correct horse"}, {"password": "[SECRET]"}),
        ({"apiKey": "abc"}, {"apiKey": "[SECRET]"}),
        ({"client_secret": "abc", "secretary": "Anna"}, {"client_secret": "[SECRET]", "secretary": "Anna"}),
        ({"token": " Hello", "max_tokens": 5}, {"token": " Hello", "max_tokens": 5}),
        ({"access_token": "a1b2c3d4e5f6a7b8"}, {"access_token": "[SECRET]"}),
        ({"tokenizer": "some/Model-3.1-of-8B-size"}, {"tokenizer": "some/Model-3.1-of-8B-size"}),
        ({"password": {"type": "string"}}, {"password": {"type": "string"}}),
        (
            {"id": CARD, "created": 1700000000, "ms": 1700000000123},
            {"id": "[CARD]", "created": 1700000000, "ms": 1700000000123},
        ),
        ({"x": -CARD, "y": float(CARD), "z": True}, {"x": -CARD, "y": float(CARD), "z": True}),
    ],
)
def test_fields_and_numbers(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    assert redacted(given_) == expected


def test_media_are_dropped() -> None:
    url = f"data:image/png;base64,{PICTURE}"
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
        {"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "text", "text": f"![cat]({url})"},
    ]
    found = redacted(parts)
    assert found[0]["image_url"] == {"url": "data:image/png;base64,[DATA 768 bytes]", "detail": "low"}
    assert found[1]["source"]["data"] == found[2]["input_audio"]["data"] == "[DATA 768 bytes]"
    assert found[3] == parts[3]
    assert found[4]["text"] == "![cat](data:image/png;base64,[DATA])"


def test_what_tells_a_text_token_by_token_is_left_out() -> None:
    tokens = [{"token": "jane", "logprob": -0.5}, {"token": "@example.com", "logprob": -0.5}]
    answer = {"choices": [{"message": {"content": "jane@example.com"}, "logprobs": {"content": tokens}}]}
    assert redacted(answer) == {"choices": [{"message": {"content": "[EMAIL]"}, "logprobs": None}]}
    assert redacted({"logprobs": True, "top_logprobs": 2}) == {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", b""),
        (b'{"a": "jane@example.com', b'{"a": "[EMAIL]'),
        (b"jane@example.com \xff", "[EMAIL] �".encode()),
        (b'{"a": NaN, "b": "jane@example.com \\ud83d"}', b'{"a":NaN,"b":"[EMAIL] \\ud83d"}'),
        (b'"jane@example.com"', b'"[EMAIL]"'),
        (b"4111111111111111", b'"[CARD]"'),
        (b"[" * 900 + b'"jane@example.com"' + b"]" * 900, b"[" * 900 + b'"[EMAIL]"' + b"]" * 900),
        (b"[" * 100_000 + b"jane@example.com", b"[" * 100_000 + b"[EMAIL]"),
    ],
)
def test_what_is_hardly_json(body: bytes, expected: bytes) -> None:
    assert Redactor().json(body) == expected


@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_was_cut_is_blacked_out_up_to_the_cut(ascii_only: bool) -> None:
    content = f'Für "cards"\n{CARD}\n4111-1111-1111-1111\tjane@example.com\n+49 30 901820\n{PEM}\nend'
    request = {"messages": [{"content": content, "n": CARD}], "password": "correct horse", "last": "x"}
    written = json.dumps(request, ensure_ascii=ascii_only, separators=(",", ":")).replace("@", "\\u0040")
    secrets = [str(CARD), "4111-1111-1111-1111", "jane\\u0040example.com", "+49 30 901820", "correct horse", "q83v=="]
    for cut in range(1, len(written)):
        head = written[:cut]
        found = Redactor().json(head.encode()).decode()
        for secret in secrets:
            if secret in head[:-2]:
                assert secret not in found, (cut, secret)
    whole = json.dumps(redacted(request), ensure_ascii=False, separators=(",", ":"))
    assert json.loads(Redactor().json(written[:-1].encode()) + b"}") == json.loads(whole)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(ALONE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
ONES = st.sampled_from([(kind, text) for kind, texts in WHOLE.items() for text in texts])


@given(value=JSON)
def test_what_holds_nothing_stays_equal(value: Any) -> None:
    if json.loads(json.dumps(value)) == value:
        assert redacted(value) == value


@given(value=JSON, one=ONES, ascii_only=st.booleans())
def test_what_is_in_any_place_is_found(value: Any, one: tuple[str, str], ascii_only: bool) -> None:
    kind, text = one
    found = redacted([value, {"deep": [f"It is {text}."]}, value], ascii_only=ascii_only)
    assert found[1] == {"deep": [f"It is [{kind}]."]}
