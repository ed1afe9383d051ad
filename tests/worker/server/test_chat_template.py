"""Prompts equal those of ``transformers``; whatever a message says, it stays inside its turn."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.worker.server.test_tokenizer import WILD
from worker.server.chat_template import ChatTemplate, TemplateRefused, UnusableModel, load_chat_template
from worker.server.tokenizer import Tokenizer

ORDINARY = [text for text in WILD if "<|" not in text and "<repo" not in text]
Messages = list[dict[str, str]]


def expected_ids(reference: PreTrainedTokenizerFast, messages: Messages) -> list[int]:
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("text", ORDINARY, ids=range(len(ORDINARY)))
def test_prompts_equal_the_references(
    template: ChatTemplate, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str
) -> None:
    for messages in (
        [{"role": "user", "content": text}],
        [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": text + " <"},
        ],
    ):
        assert template.encode(messages) == expected_ids(reference, messages)


HOSTILE = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|>", "\n", "assistant", "x", "<|endoftext|>"]
    )
)


@given(HOSTILE, HOSTILE)
@settings(max_examples=300, deadline=None)
def test_a_message_can_not_forge_a_turn(
    template: ChatTemplate, tokenizer: Tokenizer, a: list[str], b: list[str]
) -> None:
    """The special tokens are those of the same talk with harmless texts, and all text is kept."""
    first, second = "".join(a), "".join(b)
    harmless = template.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    hostile = template.render([{"role": "user", "content": first}, {"role": "assistant", "content": second}])
    assert [piece for piece in hostile if isinstance(piece, int)] == [
        piece for piece in harmless if isinstance(piece, int)
    ]
    assert f"user\n{first}" in hostile
    assert f"assistant\n{second}" in hostile
    ids = template.encode([{"role": "user", "content": first}])
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_text_beside_the_templates_own_can_not_complete_a_special_token(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ '<|im_' }}{{ messages[0]['content'] }}{{ 'start|>' }}", tokenizer)
    assert template.render([{"role": "user", "content": "start|>"}]) == ["<|im_start|>start|>"]
    assert template.render([{"role": "user", "content": "<|im_"}]) == ["<|im_<|im_start|>"]


def test_templates_see_special_tokens_of_messages_as_text_of_no_case(tokenizer: Tokenizer) -> None:
    source = "<|im_start|>{{ messages[0]['content'] | upper | trim }}{{ messages | tojson }}"
    rendered = ChatTemplate(source, tokenizer).render([{"role": "user", "content": " a<|im_end|> "}])
    assert rendered == [1, 'A<|im_end|>[{"role": "user", "content": " a<|im_end|> "}]']


def test_a_template_that_tears_text_apart_is_not_guessed_at(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0]['content'][:5] }}", tokenizer)
    assert template.render([{"role": "user", "content": "ordinary"}]) == ["ordin"]
    with pytest.raises(TemplateRefused, match="special tokens"):
        template.render([{"role": "user", "content": "<|im_end|>"}])


def test_what_templates_of_the_hub_use_works(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    source = (
        "{%- set ns = namespace(seen=0) -%}\n"
        "{%- for message in messages -%}\n"
        "    {%- if loop.index > 2 %}{% break %}{% endif -%}\n"
        "    {%- set ns.seen = ns.seen + 1 -%}\n"
        "    {{ bos_token + message.role + eos_token }}\n"
        "    {% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
        "{%- endfor -%}\n"
        "{% if tools is none %}{{ ns.seen }}{% endif %}{{ strftime_now('') }}"
    )
    messages = [
        {"role": "user", "content": "é <b>"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    expected = reference.apply_chat_template(messages, chat_template=source, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(source, tokenizer).render(messages) == tokenizer.split_special(str(expected))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[7].content.text }}", "can't render messages"),
        ("{{ messages[0].content + 1 }}", "can't render messages"),
        ("{{ ''.__class__.__mro__ }}", "can't render messages"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "can't render messages"),
        ("{{ messages.append(1) }}", "can't render messages"),
        ("{{ range(10**9) | list }}", "can't render messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "can't render messages"),
        ("{{ messages | tojson(cls=1) }}", "can't render messages"),
        ("{{ messages | tojson(cls=namespace) }}", "can't render messages"),
        ("{{ messages | tojson(default=raise_exception) }}", "can't render messages"),
        ("{{ messages | tojson(indent=10**9) }}", "can't render messages"),
        ("{{ messages | tojson(indent='x' * 10000) }}", "can't render messages"),
        ("{{ messages | tojson(separators=[1, 2]) }}", "can't render messages"),
        ("{{ messages | tojson(separators=5) }}", "can't render messages"),
        ("{{ namespace(a=1).a.b.c }}", "can't render messages"),
    ],
)
def test_trouble_in_a_template_is_a_refusal(tokenizer: Tokenizer, source: str, said: str) -> None:
    with pytest.raises(TemplateRefused, match=said):
        ChatTemplate(source, tokenizer).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "options",
    ["", "false", "true, 2", "indent=4", "separators=(',', ':')", "sort_keys=true, separators=[', ', ' = '], indent=1"],
)
def test_json_is_written_as_the_reference_writes_it(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, options: str
) -> None:
    source = f"{{{{ [messages[0], {{'b': 1, 'a': [none, 2.5, 'é']}}] | tojson({options}) }}}}"
    messages = [{"role": "user", "content": "ü"}]
    expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source, tokenizer).render(messages) == [expected]


def encoded(value: Any) -> tuple[int, bytes]:
    """A metadata value as a GGUF file holds it: its type and its bytes."""
    if isinstance(value, str):
        data = value.encode(errors="surrogateescape")
        return 8, struct.pack("<Q", len(data)) + data
    if isinstance(value, list):
        items = [encoded(item) for item in value]
        kind = items[0][0] if items else 4
        return 9, struct.pack("<IQ", kind, len(items)) + b"".join(data for _, data in items)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (5, struct.pack("<i", value))


PREFIX = "tokenizer.ggml."
LETTERS = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
SMALL: dict[str, Any] = {
    "general.alignment": 32,
    f"{PREFIX}model": "gpt2",
    f"{PREFIX}pre": "smollm",
    f"{PREFIX}tokens": [*LETTERS, "ab", "<|end|>"],
    f"{PREFIX}merges": ["a b"],
    f"{PREFIX}token_type": [1] * (len(LETTERS) + 1) + [3],
    f"{PREFIX}eos_token_id": len(LETTERS) + 1,
    "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
}


def small_file(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "small.gguf"
    fields = [(name, *encoded(value)) for name, value in (SMALL | changes).items() if value is not None]
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    path.write_bytes(head + b"".join(encoded(name)[1] + struct.pack("<I", kind) + data for name, kind, data in fields))
    return path


def test_a_small_model_is_usable(tmp_path: Path) -> None:
    template = load_chat_template(small_file(tmp_path, {}))
    assert template.encode([{"role": "user", "content": "ab!"}]) == [len(LETTERS), 0, len(LETTERS) + 1]
    assert load_chat_template(small_file(tmp_path, {f"{PREFIX}token_type": None})).tokenizer.special_tokens == {}


@pytest.mark.parametrize("value", ["x", 7, 99_999, -1, math.nan, [], [5], ["x"], [[1]]], ids=repr)
@pytest.mark.parametrize("name", SMALL)
def test_metadata_of_any_type_makes_a_model_usable_or_not(tmp_path: Path, name: str, value: Any) -> None:
    """Whatever stands in a file, the one who starts the worker gets one sentence."""
    try:
        load_chat_template(small_file(tmp_path, {name: value}))
    except UnusableModel as refused:
        assert "small.gguf" in str(refused)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{PREFIX}tokens": 7}, "tokens is no list of str"),
        ({f"{PREFIX}tokens": []}, "0 tokens"),
        ({f"{PREFIX}tokens": None}, "no metadata"),
        ({f"{PREFIX}merges": [5]}, "merges is no list of str"),
        ({f"{PREFIX}token_type": [1]}, "with 1 types"),
        ({f"{PREFIX}token_type": 1}, "token_type is no list of int"),
        ({f"{PREFIX}pre": ["smollm"]}, "pre is no text"),
        ({f"{PREFIX}eos_token_id": 99_999}, "has no token 99999"),
        ({f"{PREFIX}bos_token_id": -1}, "has no token -1"),
        ({f"{PREFIX}tokens": [*LETTERS, "ab", ""]}, "special token"),
        ({f"{PREFIX}tokens": [*LETTERS, "ab", "\udcff"]}, "special token"),
        ({"tokenizer.chat_template": 7}, "template is no text"),
        ({"tokenizer.chat_template": "{% if %}"}, "can't be compiled"),
        ({"tokenizer.chat_template": "{% for a in b %}" * 40 + "{% endfor %}" * 40}, "can't be compiled"),
        ({"tokenizer.chat_template": "(" * 3 + "{{ " + "(" * 5000}, "can't be compiled"),
        ({"general.alignment": 0}, "alignment"),
    ],
)
def test_an_unusable_model_is_told_in_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnusableModel, match=said):
        load_chat_template(small_file(tmp_path, changes))


@pytest.mark.parametrize("depth", [300, 900])
def test_what_is_nested_too_deeply_is_refused(template: ChatTemplate, depth: int) -> None:
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": nested}}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    if depth > 500:
        with pytest.raises(TemplateRefused, match="of this form"):
            template.encode(talk)
    else:
        assert template.encode(talk)
