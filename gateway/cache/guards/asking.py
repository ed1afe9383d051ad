"""Guards of how a question is put: its language, its kind, of whom it speaks, and of which time."""

from __future__ import annotations

import re
from typing import Final

from gateway.cache.guards.english_question import ALIKE
from gateway.cache.guards.reading import Reading
from gateway.cache.guards.stems import PAST

_PAST_FORM: Final = re.compile("[a-z]{2,}ed")


def language(asked: Reading, kept: Reading) -> str | None:
    """The language in which they are written."""
    return "written in different languages" if asked.language != kept.language else None


def question_type(asked: Reading, kept: Reading) -> str | None:
    if asked.kind == kept.kind or frozenset((asked.kind, kept.kind)) in ALIKE:
        return None if asked.asides == kept.asides else "a question inside"
    return f"{asked.kind} and {kept.kind}"


def person(asked: Reading, kept: Reading) -> str | None:
    """I, you, he ... in their order: "what should I tell him" is not "what should he tell me"."""
    if asked.persons == kept.persons or (set(asked.persons) == set(kept.persons) and len(set(asked.persons)) == 1):
        return None
    return "persons"


def tense(asked: Reading, kept: Reading) -> str | None:
    """Who is, who was, who will be; can, should and must."""
    if asked.modals != kept.modals:
        return "modal verbs"
    if (asked.past and kept.present and not kept.past) or (kept.past and asked.present and not asked.past):
        return "past and present"
    if asked.kind != kept.kind and (asked.past or kept.past) and "howto" in (asked.kind, kept.kind):
        return "past and present"
    auxiliary = asked.past or kept.past or asked.present or kept.present
    if not auxiliary and _past_forms(asked) != _past_forms(kept):
        return "past and present"
    return None


def _past_forms(reading: Reading) -> set[str]:
    return {word.key for word in reading.words if word.form in PAST or _PAST_FORM.fullmatch(word.form)}
