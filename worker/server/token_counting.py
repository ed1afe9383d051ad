"""What this worker vouches for about its prompts' tokens, so that a gateway can count them before it asks.

A chat template is a program: what it does with a message can't be read off it, but can be tried. Each role's
surroundings are learned from short chats, put together for many random ones, and vouched for only if the template
itself renders every one of those alike.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from worker.protocol.token_counting import ChatForm, InputForm, TokenCounting, Turn
from worker.server.chat_template import ChatTemplate, TemplateRefused

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_WITHOUT_TOOLS: Final = ROLES[:-1]
"""Many a template puts several results of tools into one turn: then chats that have some are not counted."""
_MARK: Final = "Qzx7Vw"
"""A text that no template has. Two of them differ in the digit."""
_TRIALS: Final = 200
_FEWEST_TRIALS: Final = 40
_FEWEST_REQUEST_TOKENS: Final = 256
_FEWEST_MESSAGE_TOKENS: Final = 32
"""Bounds for messages with more than role and text, whose wrapping was not tried; never below what was measured."""
_INDENTED_OR_NOT: Final = 4
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

_Pieces = list[str | int]


class _Uncountable(Exception):
    """The template is none that can be counted from outside; the message says why."""


def describe_counting(template: ChatTemplate) -> tuple[TokenCounting, str | None]:
    """What to tell gateways, and why there is no form, if there is none. Takes some 50 ms of CPU time."""
    form, why_not = None, None
    for roles in (ROLES, _WITHOUT_TOOLS):
        try:
            form, why_not = _chat_form(template, roles), None
            break
        except _Uncountable as fault:
            why_not = why_not or str(fault)
    request_tokens, message_tokens = _allowances(template)
    told = TokenCounting(
        tokens=template.tokenizer.plain_tokens,
        pattern=template.tokenizer.pattern,
        form=form,
        request_tokens=request_tokens,
        message_tokens=message_tokens,
        nested_tokens_per_byte=_nested_tokens_per_byte(template.source),
        inputs=InputForm(
            special=list(template.tokenizer.special_tokens),
            prefix_tokens=len(template.tokenizer.prefix_ids),
            gap_tokens=len(template.tokenizer.fill_in_middle or ()),
        ),
    )
    return told, why_not


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a template puts before a message's text and after it."""

    head: Sequence[str | int]
    before: str
    after: str
    tail: Sequence[str | int]

    def around(self, text: str) -> _Pieces:
        whole = self.before + text + self.after
        return [*self.head, *([whole] if whole else []), *self.tail]

    def turn(self, template: ChatTemplate) -> Turn:
        return Turn(_tokens(template, [*self.head, *self.tail]), self.before, self.after)


def _chat_form(template: ChatTemplate, roles: Sequence[str]) -> ChatForm:
    """Raises _Uncountable."""
    if "strftime_now" in template.source:
        raise _Uncountable("its chat template tells the date")
    first = {role: found for role in roles if (found := _alone(template, role)) is not None}
    if not first:
        raise _Uncountable("its chat template renders no message alone")
    later = {role: found for role in roles if (found := _behind(template, role, first)) is not None}
    end = _end(template, first)
    _try(template, first, later, end)
    return ChatForm(
        first={role: found.turn(template) for role, found in first.items()},
        later={role: found.turn(template) for role, found in later.items()},
        end_tokens=_tokens(template, end),
    )


def _rendered(template: ChatTemplate, chat: Sequence[tuple[str, str]], *, end: bool = False) -> _Pieces | None:
    """None if the template refuses."""
    messages = [{"role": role, "content": text} for role, text in chat]
    try:
        return template.render(messages, add_generation_prompt=end)
    except TemplateRefused:
        return None


def _cut(pieces: _Pieces, mark: str) -> _Surroundings:
    """Raises _Uncountable."""
    places = [at for at, piece in enumerate(pieces) if isinstance(piece, str) and mark in piece]
    if len(places) != 1 or str(pieces[places[0]]).count(mark) != 1:
        raise _Uncountable("its chat template does not show each message once")
    before, _, after = str(pieces[places[0]]).partition(mark)
    return _Surroundings(pieces[: places[0]], before, after, pieces[places[0] + 1 :])


def _alone(template: ChatTemplate, role: str) -> _Surroundings | None:
    pieces = _rendered(template, [(role, _MARK)])
    return None if pieces is None else _cut(pieces, _MARK)


def _behind(template: ChatTemplate, role: str, first: Mapping[str, _Surroundings]) -> _Surroundings | None:
    """What is around a message that another one precedes; None where the template lets none."""
    for other, its in first.items():
        pieces = _rendered(template, [(other, _MARK), (role, _MARK[::-1])])
        if pieces is None:
            continue
        begun = its.around(_MARK)
        found = _cut(pieces, _MARK[::-1])
        head = list(found.head)
        if head[: len(begun)] != begun:
            raise _Uncountable("its chat template ends a message in another way when one follows")
        head = head[len(begun) :]
        if not head or not isinstance(head[0], int):
            raise _Uncountable("its chat template does not begin messages with special tokens")
        return _Surroundings(head, found.before, found.after, found.tail)
    return None


def _end(template: ChatTemplate, first: Mapping[str, _Surroundings]) -> _Pieces:
    for role, its in first.items():
        pieces = _rendered(template, [(role, _MARK)], end=True)
        if pieces is None:
            continue
        begun = its.around(_MARK)
        end = pieces[len(begun) :]
        if pieces[: len(begun)] != begun or (end and not isinstance(end[0], int)):
            raise _Uncountable("its chat template does not begin the answer with a special token")
        return end
    raise _Uncountable("its chat template begins no answer")


def _try(
    template: ChatTemplate, first: Mapping[str, _Surroundings], later: Mapping[str, _Surroundings], end: _Pieces
) -> None:
    """Raises _Uncountable unless random chats are rendered as they are put together here."""
    draw = random.Random(0)
    special = list(template.tokenizer.special_tokens)
    scraps = [" ", "  ", "\n", "\n\n", "\t", "a", "Hello", "Ünï ", "7", "<", "|", "'s", "\u00a0", "日本", "😀"]
    scraps += ["<think>", "</think>", "<tool_call>", "{", "}", "[INST]", "###", "/think", "/no_think", "```", "http://"]
    tried = 0
    for _ in range(_TRIALS):
        roles = [draw.choice(list(first)), *draw.choices(list(later) or [""], k=draw.randrange(6) if later else 0)]
        texts = ["".join(draw.choices(scraps + special, k=draw.randrange(1, 8))) for _ in roles]
        ends = draw.random() < 0.8
        pieces = _rendered(template, list(zip(roles, texts, strict=True)), end=ends)
        if pieces is None:
            continue
        tried += len(roles) > 1
        built = first[roles[0]].around(texts[0])
        built += itertools.chain(*(later[role].around(text) for role, text in zip(roles[1:], texts[1:], strict=True)))
        if pieces != built + (end if ends else []):
            raise _Uncountable("its chat template changes messages, or treats them by their place or text")
    if later and tried < _FEWEST_TRIALS:
        raise _Uncountable("its chat template refuses most chats, so that it could not be tried")


def _allowances(template: ChatTemplate) -> tuple[int, int]:
    """Most that is around one empty message, and around each more. In bytes of text, whatever it is merged with."""
    sizes: list[int] = []
    more: list[int] = []
    tools: list[Mapping[str, Any]] = [_TOOL]
    for role, given in itertools.product(ROLES, (None, tools)):
        try:
            alone = _bytes(template.render([{"role": role, "content": ""}], tools=given))
        except TemplateRefused:
            continue
        sizes.append(alone)
        for other in ROLES:
            messages = [{"role": role, "content": ""}, {"role": other, "content": ""}]
            try:
                more.append(_bytes(template.render(messages, tools=given)) - alone)
            except TemplateRefused:
                continue
    return max([_FEWEST_REQUEST_TOKENS, *sizes]), max([_FEWEST_MESSAGE_TOKENS, *more])


def _nested_tokens_per_byte(source: str) -> int:
    """A space or a line's beginning goes before each value; indentation grows with depth, without a bound."""
    return 0 if "indent" in source else _INDENTED_OR_NOT if "tool" in source else 1


def _bytes(pieces: _Pieces) -> int:
    return sum(1 if isinstance(piece, int) else len(piece.encode()) for piece in pieces)


def _tokens(template: ChatTemplate, pieces: Sequence[str | int]) -> int:
    return sum(1 if isinstance(piece, int) else len(template.tokenizer.encode(piece)) for piece in pieces)
