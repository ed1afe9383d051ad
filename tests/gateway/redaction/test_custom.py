"""A tenant's own patterns."""

from __future__ import annotations

import re

import msgspec
import pytest

from gateway.redaction import Redactor, compile_patterns


class Own(msgspec.Struct):
    name: str
    regex: str


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        (r"\bEMP-\d{5}\b", "EMP-12345 and EMP-123456", "[OWN] and EMP-123456"),
        (r"(?i)müller", "Herr MÜLLER ging", "Herr [OWN] ging"),
        (r"\p{Han}{2,}", "在北京市 x", "[OWN] x"),
        (r"(a+)+b", "aaaab aaaa", "[OWN] aaaa"),
        (r"^Dear (\w+),", "Dear Jane, dear John,", "[OWN] dear John,"),
        (r".$", "end", "en[OWN]"),
        (r"jane@\w+", "jane@example.com", "[OWN]"),
    ],
)
def test_they_stand_beside_the_built_in_kinds(regex: str, text: str, expected: str) -> None:
    redactor = Redactor([Own("own", regex)])
    assert redactor.text(text) == expected
    assert redactor.counts["OWN"] == 1


def test_each_has_its_placeholder_and_the_first_given_does_not_hide_the_second() -> None:
    redactor = Redactor([Own("case_no", r"C\d+"), Own("Employee", r"E\d+")])
    assert redactor.text("C1 E2 C3, jane@example.com") == "[CASE_NO] [EMPLOYEE] [CASE_NO], [EMAIL]"
    assert redactor.json(b'{"C1": "C1"}') == b'{"C1":"[CASE_NO]"}'


@pytest.mark.parametrize(
    ("patterns", "remedy"),
    [
        ([Own("own", "(")], "'own' is not in RE2's syntax (missing ): ("),
        ([Own("own", "(?=a)")], "no look-around"),
        ([Own("own", r"(a)\1")], "not in RE2's syntax"),
        ([Own("own", "a*")], "make it need a character"),
        ([Own("own", "")], "make it need a character"),
        ([Own("own", "a{1000}" * 70)], "write + for counted repetitions"),
        ([Own("own", "\ud83d")], "half a surrogate pair"),
        ([Own("", "a")], "must be a letter"),
        ([Own("a b", "a")], "must be a letter"),
        ([Own("x" * 33, "a")], "must be a letter"),
        ([Own("one", "a"), Own("ONE", "b")], "two patterns have the name"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_remedy(
    patterns: list[Own], remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        compile_patterns(patterns)
    with pytest.raises(ValueError, match=re.escape(remedy)):
        Redactor(patterns)
    assert capfd.readouterr().err == ""
