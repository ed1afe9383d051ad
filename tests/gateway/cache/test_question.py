"""What tells two requests apart, and what does not."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis import Api
from gateway.cache.question import MAX_TEXT, Meaning, Question, meaning_of, read_question, speaks_of_now
from gateway.policies.answer_cache import CacheRules
from gateway.redis_url import asyncio_client
from tests.gateway.cache.support import EXACT, SECRET, SEMANTIC, NumberGuards, body, changed, chat, question, room

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "How do I reset my password?"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FULL: dict[str, Any] = {
    "model": "m",
    "messages": TURNS,
    "temperature": 0,
    "top_p": 0.5,
    "max_tokens": 100,
    "n": 1,
    "stop": ["a"],
    "seed": 0,
    "logprobs": False,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {"5": 1},
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "reasoning_effort": "low",
    "user": "u",
    "safety_identifier": "s",
    "unknown": {"deep": [1, {"a": None}]},
}


def changed_turn(index: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**turn, **fields} if at == index else turn for at, turn in enumerate(TURNS)]


ANOTHER: dict[str, list[Any]] = {
    "model": ["m2"],
    "messages": [
        changed_turn(0, content="Be long."),
        changed_turn(0, role="developer"),
        changed_turn(1, content="Hallo."),
        changed_turn(2, content="Good day"),
        changed_turn(3, name="x"),
        changed_turn(3, content=[{"type": "text", "text": "How do I reset my password?"}]),
        TURNS[1:],
        [*TURNS[:2], TURNS[3]],
    ],
    "temperature": [-0.0, 0.0],
    "top_p": [0.50, 0.51, 0],
    "max_tokens": [101, None],
    "n": [2, 1.0],
    "stop": ["a", ["a", "b"], []],
    "seed": [1, "0", False],
    "logprobs": [True, 0],
    "frequency_penalty": [0.5],
    "presence_penalty": [0],
    "logit_bias": [{"5": 2}, {"6": 1}, {}],
    "tools": [[], [TOOL, TOOL], [{**TOOL, "function": {"name": "g", "parameters": {"type": "object"}}}]],
    "tool_choice": ["none"],
    "parallel_tool_calls": [False],
    "response_format": [{"type": "json_object"}],
    "reasoning_effort": ["high"],
    "user": ["v"],
    "safety_identifier": ["v"],
    "unknown": [{"deep": [1, {"a": 0}]}, {"deep": [{"a": None}, 1]}],
}
OTHERS: list[dict[str, Any]] = [
    {"tenant_id": UUID(int=77)},
    {"project_id": UUID(int=77)},
    {"end_user": "f" * 64},
    {"route": "m2"},
    {"version": "2"},
    {"api": "messages"},
]
SAME: list[dict[str, Any]] = [
    {"stream": True},
    {"stream_options": {"include_usage": True}},
    {"metadata": {"a": "b"}},
    {"service_tier": "flex"},
    {"store": True},
]


class Names(msgspec.Struct, frozen=True):
    exact: str
    meaning: Meaning | None

    @property
    def partition(self) -> str | None:
        return None if self.meaning is None else self.meaning.partition

    @property
    def text(self) -> str | None:
        return None if self.meaning is None else self.meaning.text


def names_of(asked: Question) -> Names | str:
    read = read_question(asked, SECRET)
    if isinstance(read, str):
        return read
    return Names(read.exact, meaning_of(asked, read, SECRET, NumberGuards()))


def names(fields: dict[str, Any], rules: CacheRules = SEMANTIC, **changes: Any) -> Names | str:
    return names_of(question(fields, rules, **changes))


def found(fields: dict[str, Any], rules: CacheRules = SEMANTIC, **changes: Any) -> Names:
    made = names(fields, rules, **changes)
    assert isinstance(made, Names), made
    return made


def test_the_matrix_names_every_field() -> None:
    assert ANOTHER.keys() == FULL.keys()


def matrix() -> list[Any]:
    """One field at a time: another value, and none at all."""
    cases = [
        pytest.param({**FULL, field: value}, {}, id=f"{field}-{number}")
        for field, values in ANOTHER.items()
        for number, value in enumerate(values)
        if msgspec.json.encode(value) != msgspec.json.encode(FULL[field])
    ]
    left_out = ("messages", "temperature")
    cases += [
        pytest.param({name: FULL[name] for name in FULL if name != field}, {}, id=f"{field}-left-out")
        for field in FULL
        if field not in left_out
    ]
    cases.append(pytest.param({**FULL, "more": None}, {}, id="one-more"))
    return cases + [pytest.param(FULL, change, id=next(iter(change))) for change in OTHERS]


@pytest.mark.parametrize(("fields", "change"), matrix())
def test_one_change_is_another_question_for_both_tiers(fields: dict[str, Any], change: dict[str, Any]) -> None:
    one, other = found(FULL), found(fields, **change)
    assert one.exact != other.exact
    assert one.partition is not None
    assert one.partition != other.partition


def test_another_last_text_is_another_name_in_the_same_partition() -> None:
    one, other = found(FULL), found({**FULL, "messages": changed_turn(3, content="And my name?")})
    assert one.exact != other.exact
    assert one.partition == other.partition
    assert other.text == "And my name?"


@pytest.mark.parametrize("extra", SAME, ids=lambda extra: next(iter(extra)))
def test_what_changes_no_answer_changes_no_name(extra: dict[str, Any]) -> None:
    assert found({**FULL, **extra}) == found(FULL)


@pytest.mark.parametrize("change", [{"end_user": "f" * 64}, {"fields": {"user": "v"}}, {"fields": {}}])
def test_end_users_may_share(change: dict[str, Any]) -> None:
    rules = changed(SEMANTIC, across_end_users=True)
    fields = {**{name: value for name, value in FULL.items() if name != "user"}, **change.pop("fields", {})}
    assert found(FULL, rules) == found(fields, rules, **change)
    assert found(FULL, rules).exact != found(FULL).exact


def test_projects_may_share() -> None:
    rules = changed(SEMANTIC, across_projects=True)
    assert found(FULL, rules) == found(FULL, rules, project_id=UUID(int=77))
    assert found(FULL, rules).exact != found(FULL, rules, tenant_id=UUID(int=77)).exact


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc é", max_size=3), inner, max_size=3),
    max_leaves=8,
)


def spelled(value: Any, spaces: str, backwards: bool, escaped: bool) -> str:
    """JSON of it, in another hand."""
    if isinstance(value, dict):
        pairs = list(value.items())
        inner = [
            f"{spelled(key, spaces, backwards, escaped)}{spaces}:{spaces}{spelled(held, spaces, backwards, escaped)}"
            for key, held in (reversed(pairs) if backwards else pairs)
        ]
        return "{" + spaces + f",{spaces}".join(inner) + spaces + "}"
    if isinstance(value, list):
        return "[" + spaces + f"{spaces},".join(spelled(held, spaces, backwards, escaped) for held in value) + "]"
    if isinstance(value, str) and escaped:
        units = value.encode("utf-16-be")
        return '"' + "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)) + '"'
    return msgspec.json.encode(value).decode()


@given(JSON, st.sampled_from(["", " ", "\n\t "]), st.booleans(), st.booleans())
def test_spelling_does_not_matter(value: Any, spaces: str, backwards: bool, escaped: bool) -> None:
    text = spelled({**chat(), "unknown": value}, spaces, backwards, escaped)
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    assert names_of(question_of(raw)) == found({**chat(), "unknown": value}, EXACT)


def question_of(raw: dict[str, msgspec.Raw]) -> Question:
    return msgspec.structs.replace(question(), body=raw)


@given(JSON, JSON)
def test_other_values_are_other_questions(one: Any, other: Any) -> None:
    same = msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")
    assert (found({**chat(), "x": one}) == found({**chat(), "x": other})) is same


@pytest.mark.parametrize("written", ["1", "1.0", "1e0", '"1"', "true", "[1]", "1.00000000000000000001"])
def test_numbers_are_as_they_were_written(written: str) -> None:
    others = {"1", "1.0", "1e0", '"1"', "true", "[1]", "1.00000000000000000001"} - {written}
    asked = [{**body(chat()), "seed": msgspec.Raw(value.encode())} for value in (written, *others)]
    found_names = [names_of(question_of(raw)) for raw in asked]
    assert found_names[0] not in found_names[1:]


@pytest.mark.parametrize(
    ("api", "fields", "reason"),
    [
        ("chat_completions", {"temperature": 1}, "sampled"),
        ("chat_completions", {"temperature": 0.01}, "sampled"),
        ("chat_completions", {"temperature": None}, "sampled"),
        ("chat_completions", {"temperature": "0"}, "sampled"),
        ("chat_completions", {"temperature": False}, "sampled"),
        ("chat_completions", {"web_search_options": {}}, "live_tools"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "live_tools"),
        ("responses", {"input": "x"}, "stored"),
        ("responses", {"input": "x", "store": True}, "stored"),
        ("responses", {"input": "x", "store": False, "previous_response_id": "resp_1"}, "stored"),
        ("responses", {"input": "x", "store": False, "conversation": {"id": "c"}}, "stored"),
        ("responses", {"input": "x", "store": False, "background": True}, "stored"),
    ],
)
def test_some_requests_are_none_of_the_caches(api: Api, fields: dict[str, Any], reason: str) -> None:
    assert names({**chat(), **fields}, EXACT, api=api) == reason
    willing = changed(EXACT, sampled=True, time_words=True)
    assert isinstance(names({**chat(), **fields}, willing, api=api), Names) is (reason != "stored")


@pytest.mark.parametrize(
    ("api", "fields", "now"),
    [
        ("chat_completions", {}, False),
        ("chat_completions", {"messages": changed_turn(3, content="What is new today?")}, True),
        ("chat_completions", {"messages": changed_turn(1, content="What is new today?")}, True),
        ("chat_completions", {"messages": changed_turn(0, content="You live today.")}, False),
        ("chat_completions", {"messages": changed_turn(1, content=[{"type": "text", "text": "Today?"}, IMAGE])}, True),
        ("responses", {"input": "What is new today?"}, True),
        ("completions", {"prompt": ["Fine", "What is new today?"]}, True),
        ("completions", {"prompt": ["Fine"]}, False),
        ("completions", {"prompt": [1, 2]}, True),
        ("embeddings", {"input": "What is new today?"}, False),
    ],
)
def test_what_the_user_says_may_be_of_the_present(api: Api, fields: dict[str, Any], now: bool) -> None:
    assert speaks_of_now(question({**FULL, **fields}, api=api), NumberGuards()) is now


def test_a_temperature_that_is_left_out_is_the_apis_own() -> None:
    fields = {name: value for name, value in chat().items() if name != "temperature"}
    assert names(fields) == "sampled"
    assert isinstance(names({"model": "m", "input": "What is new today?"}, api="embeddings"), Names)


@pytest.mark.parametrize("temperature", ["0", "0.0", "-0.0", "0e5"])
def test_zero_is_zero_however_it_is_written(temperature: str) -> None:
    raw = {**body(chat()), "temperature": msgspec.Raw(temperature.encode())}
    assert isinstance(names_of(question_of(raw)), Names)


@pytest.mark.parametrize("written", [rb'"\ud800"', b'"\xff"', b"[" * 3000 + b"]" * 3000], ids=["half", "byte", "deep"])
def test_what_cannot_be_read_is_left_alone(written: bytes) -> None:
    raw = {**body(chat()), "unknown": msgspec.Raw(written)}
    assert names_of(question_of(raw)) == "unreadable"


@pytest.mark.parametrize(
    ("api", "fields", "text"),
    [
        ("chat_completions", {}, "How do I reset my password?"),
        ("chat_completions", {"messages": changed_turn(3, content=[{"type": "text", "text": "A"}] * 2)}, "A\nA"),
        ("messages", {"messages": changed_turn(3, content=[{"type": "text", "text": "A", "cache_control": {}}])}, "A"),
        ("responses", {"store": False, "input": "Why?"}, "Why?"),
        ("responses", {"store": False, "input": [{"role": "user", "content": "Why?"}]}, "Why?"),
        (
            "responses",
            {"store": False, "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]},
            "Why?",
        ),
    ],
)
def test_the_last_turn_is_compared_by_its_text(api: Api, fields: dict[str, Any], text: str) -> None:
    made = found({**FULL, **fields}, api=api)
    assert made.text == text
    assert made.partition is not None


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat_completions", {"messages": changed_turn(3, content=[{"type": "text", "text": "A"}, IMAGE])}),
        ("chat_completions", {"messages": changed_turn(3, content=[])}),
        ("chat_completions", {"messages": changed_turn(3, content=None)}),
        ("chat_completions", {"messages": changed_turn(3, content=" \n")}),
        ("chat_completions", {"messages": changed_turn(3, content="é")}),
        ("chat_completions", {"messages": changed_turn(3, content="a" * (MAX_TEXT + 1))}),
        ("chat_completions", {"messages": TURNS[:3]}),
        ("chat_completions", {"messages": [*TURNS, {"role": "tool", "tool_call_id": "t", "content": "A"}]}),
        ("chat_completions", {"messages": ["A"]}),
        ("chat_completions", {"messages": []}),
        ("messages", {"messages": changed_turn(3, content=[{"type": "tool_result", "text": "A"}])}),
        ("responses", {"store": False, "input": [{"type": "function_call_output", "role": "user", "content": "A"}]}),
        ("completions", {"prompt": "A"}),
        ("embeddings", {"input": "A"}),
    ],
)
def test_all_else_is_for_the_exact_tier_alone(api: Api, fields: dict[str, Any]) -> None:
    made = found({**FULL, **fields}, api=api)
    assert made.partition is None
    assert made.exact == found({**FULL, **fields}, EXACT, api=api).exact


async def test_the_matrix_holds_on_redis(redis_url: str) -> None:
    rules = changed(SEMANTIC, threshold=0.0)
    async with room(redis_url) as here:
        await here.answer(question(FULL, rules))
        assert await here.found(question(FULL, rules)) == "Yes."
        for case in matrix():
            fields, change = case.values
            assert await here.found(question(fields, rules, **change)) is None, case.id
        client = asyncio_client(redis_url, timeout_s=5)
        assert len(await client.keys("ac:*:a:*")) == 1
        await client.aclose()
        for extra in SAME:
            assert await here.found(question({**FULL, **extra}, rules)) == "Yes.", extra
