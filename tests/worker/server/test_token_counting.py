"""What a worker vouches for about its prompts: the right surroundings of each message, or none at all."""

from __future__ import annotations

import httpx
import pytest

import tests.worker.server.test_chat_template_families as families
from tests.worker.server.asking import FLEET
from tests.worker.server.conftest import StartScripted
from worker.protocol.token_counting import PATH, ChatForm, InputForm, Turn, decode_counting, encode_counting
from worker.server.chat_template import ChatTemplate
from worker.server.token_counting import describe_counting
from worker.server.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def count(tokenizer: Tokenizer, form: ChatForm, chat: list[tuple[str, str]]) -> int:
    total = form.end_tokens
    for at, (role, text) in enumerate(chat):
        turn = (form.later if at else form.first)[role]
        total += turn.tokens + len(tokenizer.encode(turn.before + text + turn.after))
    return total


def test_the_models_own_template_is_vouched_for(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    told, why_not = describe_counting(template)
    assert why_not is None
    assert told.form is not None
    assert told.form.first["system"] == Turn(3, "system\n", "")
    chats = [
        [("user", "hi")],
        [("system", "Be brief."), ("user", "  hi\n"), ("assistant", "<|im_end|> 7"), ("tool", "\n")],
        [("developer", " x"), ("user", "'s"), ("system", "日本\x04")],
    ]
    for chat in chats:
        messages = [{"role": role, "content": text} for role, text in chat]
        assert count(tokenizer, told.form, chat) == len(template.encode(messages))
    assert told.request_tokens >= len(template.encode([{"role": "user", "content": ""}]))
    # The template has no place for tools, so nothing of theirs gets into a prompt.
    assert told.nested_tokens_per_byte == 1
    assert told.inputs == InputForm(special=list(tokenizer.special_tokens), prefix_tokens=0, gap_tokens=0)
    assert decode_counting(encode_counting(told)) == told
    assert len(told.tokens) == tokenizer.vocab_size
    assert not any(told.tokens[at] for at in tokenizer.special_tokens.values())


def test_a_template_that_joins_results_of_tools_is_vouched_for_without_them(tokenizer: Tokenizer) -> None:
    told, why_not = describe_counting(ChatTemplate(families.HERMES, tokenizer))
    assert why_not is None
    assert told.form is not None
    assert set(told.form.first) == {"system", "developer", "user", "assistant"}
    assert told.nested_tokens_per_byte == 4
    assert told.message_tokens > 32


@pytest.mark.parametrize(
    ("source", "because"),
    [
        (CHATML.replace("m.content +", "m.content | trim +"), "changes messages"),
        (CHATML.replace("m.content +", "m.content.replace('/think', '') +"), "changes messages"),
        (CHATML.replace("m.content +", "(m.content if not loop.last else '!' + m.content) +"), "another way"),
        (CHATML.replace("m.content +", "m.content + m.content +"), "each message once"),
        (
            CHATML.replace("'<|im_start|>' + m.role", "m.role").replace("|>\\n", "|>"),
            "begin messages with special tokens",
        ),
        (CHATML + "{{ strftime_now('%d') }}", "date"),
        (CHATML.replace("'<|im_start|>assistant\\n'", "'assistant'"), "begin the answer"),
        ("{{ raise_exception('no') }}", "no message alone"),
        (families.LLAMA, ""),
        (families.MISTRAL, ""),
        (families.PHI, ""),
    ],
    ids=["trims", "edits", "place", "twice", "open", "date", "open end", "refuses", "llama", "mistral", "phi"],
)
def test_a_template_that_does_more_is_not_vouched_for(tokenizer: Tokenizer, source: str, because: str) -> None:
    told, why_not = describe_counting(ChatTemplate(source, tokenizer))
    assert told.form is None
    assert why_not is not None
    assert because in why_not
    assert (told.request_tokens, told.message_tokens) >= (256, 32)


def test_the_allowances_hold_what_the_template_adds(tokenizer: Tokenizer) -> None:
    told, _ = describe_counting(ChatTemplate(f"{'word ' * 200}{CHATML.replace('m.role', 'm.role * 30')}", tokenizer))
    assert told.request_tokens >= 1000
    assert told.message_tokens >= 30 * len("developer")


def test_indentation_of_tools_is_not_bounded_by_their_bytes(tokenizer: Tokenizer) -> None:
    told, _ = describe_counting(ChatTemplate(CHATML + "{{ tools | tojson(indent=2) }}", tokenizer))
    assert told.nested_tokens_per_byte == 0


async def test_it_is_told_to_the_fleet_alone(scripted: StartScripted, template: ChatTemplate) -> None:
    server = await scripted()
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        assert (await client.get(PATH)).status_code == 401
        answer = await client.get(PATH, headers=FLEET)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/vnd.msgpack"
    assert decode_counting(answer.content) == describe_counting(template)[0]
