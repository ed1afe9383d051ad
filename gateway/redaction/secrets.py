"""Secrets: keys by their looks, tokens, private keys, and what is assigned to a name that says that it is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.redaction.spans import Span, begins, compiled

API_KEY: Final = "API_KEY"
TOKEN: Final = "TOKEN"
SECRET: Final = "SECRET"
PRIVATE_KEY: Final = "PRIVATE_KEY"
MOST_OF_KEY: Final = 16_000
"""Bytes of a private key, with its first and last line; RSA's of 16,384 bits have some 12,700."""

_KEYS: Final = (
    r"sk-(?:[a-z0-9]+-){0,3}[A-Za-z0-9_-]{20,}",  # ours, OpenAI's, Anthropic's, and many more
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}",  # AWS
    r"AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{20,}|ya29\.[A-Za-z0-9_-]{20,}",  # Google
    r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}",
    r"gl(?:pat|ptt|dt|rt|soat|ft|imt|agent|cbt)-[A-Za-z0-9_-]{20,}",  # GitLab
    r"xox[abeoprs](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}",  # Slack
    r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    r"[srp]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{16,}",  # Stripe
    r"hf_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{30,}|xai-[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}|pplx-[A-Za-z0-9]{30,}",
    r"npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}|dop_v1_[a-f0-9]{64}|dckr_pat_[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|key-[0-9a-f]{32}",  # mail senders
    r"AGE-SECRET-KEY-1[A-Z0-9]{50,}",
)
_KEY = compiled("|".join(f"(?:{key})" for key in _KEYS))
_TOKEN = compiled(r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){2,4}")
_BEARER = compiled(r"(?i)\b(?:authorization[\"' ]{0,3}[:=][\"' ]{0,3}[a-z]{2,20}|bearer)[ \t]{1,4}[a-z0-9._~+/=-]{6,}")
_OF_URL = compiled(r"(?i)[a-z][a-z0-9+.-]{1,20}://[^\s/@:\"'<>]{0,128}:[^\s/@\"'<>]{1,256}@")
_NAMES: Final = (
    "pass(?:word|wd|phrase|code|wort)|pwd|kennwort|contrase(?:n|ñ)a|mot de passe|senha|wachtwoord|secret|token"
    "|(?:api|access|private|secret|auth|account|signing|encryption|master)[_ -]?key|credentials?"
)
_ASSIGNMENT: Final = (
    rf"(?i:(?:{_NAMES})(?:\\?[\"'`]|\*\*)?\s{{0,3}}(?:=>|:=|==?|:|\bis\b)\s{{0,3}}(?:\\?[\"'`]|\*\*)?[^\s\"'`\\])"
)
_ASSIGNED = compiled(_ASSIGNMENT)
_NAME = re.compile(_NAMES, re.IGNORECASE)
_VALUE_END = re.compile(rb"[\s\"'`,;)\]}>&<\\]")
_QUOTED_END = re.compile(rb"[\"'`\n\\]")
_LONG: Final = 256
_TELLING = re.compile(rb"[0-9!@#$%^&*?+=]")
_NO_VALUE = re.compile(rb"[$<{(\[%]|[\w.]+[(\[]|\*+$|x+$|\.+$|[a-z_]+(?:\.[a-z_]+)+$", re.IGNORECASE)
"""What stands in a secret's place: a variable, a template, a call, stars."""
_BEGIN = compiled(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_END = compiled(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_BODY = compiled(
    r"(?:\s|\\[nrt]|[\"']|[A-Za-z0-9+/=]{20,}|(?:Proc-Type|DEK-Info|Version|Comment|Hash):[^\n\\]{0,200})*"
    r"(?:[A-Za-z0-9+/=]{1,80})?"
)
MARKS: Final = (
    *("-----BEGIN", "eyJ[A-Za-z0-9_-]{8}", r"(?i:bearer[ \t]|authorization)", _ASSIGNMENT),
    *("sk-[A-Za-z0-9_-]{20}", "AKIA|ASIA|ABIA|ACCA", "AIza|GOCSPX-|ya29", "gh[pousr]_|github_pat_"),
    *("gl(?:pat|ptt|dt|rt|soat|ft|imt|agent|cbt)-", "xox[abeoprs]|xapp-|hooks[.]slack", "[srp]k_(?:live|test)|whsec_"),
    *("hf_|gsk_|xai-|r8_|pplx-|npm_|pypi-|dop_v1_|dckr_pat_", "SG[.]|key-[0-9a-f]{8}|AGE-SECRET"),
)
"""Patterns of which one is in every text that holds a secret."""


def api_keys(data: bytes) -> Iterator[Span]:
    for match in _KEY.finditer(data):
        start, end = match.span()
        written = data[start:end]
        if begins(data, start) and (re.search(rb"[0-9]", written) or not written.startswith(b"sk-")):
            yield Span(start, end, API_KEY)


def tokens(data: bytes) -> Iterator[Span]:
    for match in _TOKEN.finditer(data):
        start, end = match.span()
        if begins(data, start):
            # One that is not signed ends with a full stop, else that is the sentence's.
            ends_sentence = data[end - 1] == 0x2E and data.count(b".", start, end) > 2
            yield Span(start, end - ends_sentence, TOKEN)
    for match in _BEARER.finditer(data):
        start, end = match.span()
        written = data[start:end]
        value = re.split(rb"[ \t]", written)[-1]
        named = written[:1] in b"aA"
        if named or len(value) >= 24 or re.search(rb"[0-9]", value):
            yield Span(end - len(value), end, TOKEN)


def assigned(data: bytes) -> Iterator[Span]:
    at = 0
    for match in _ASSIGNED.finditer(data):
        start = match.end() - 1
        if start < at:
            continue
        quoted = data[start - 1] in b"\"'`"
        stop = (_QUOTED_END if quoted else _VALUE_END).search(data, start)
        end = stop.start() if stop is not None else len(data)
        value = data[start:end]
        if (_is_quoted_secret if quoted else _is_bare_secret)(value, data[match.start() : match.start() + 5]):
            at = start + len(value.rstrip(b".:*"))
            yield Span(start, at, SECRET)
        elif end - start > _LONG:
            # What is in it was looked through; it is not looked through again from each name in it.
            at = end
    for match in _OF_URL.finditer(data):
        start, end = match.span()
        password = data.rindex(b":", start, end) + 1
        if password < end - 1:
            yield Span(password, end - 1, SECRET)


def _is_quoted_secret(value: bytes, _: bytes) -> bool:
    return len(value) >= 4 and not _NO_VALUE.match(value)


def _is_bare_secret(value: bytes, name: bytes) -> bool:
    """A word of prose may well stand there: it has to have more than letters."""
    value = value.rstrip(b".:*")
    if len(value) < 4 or _NO_VALUE.match(value) or not _TELLING.search(value.rstrip(b"?!")):
        return False
    # A number is what a limit of tokens is, and seldom a token.
    return name.lower() != b"token" or (len(value) >= 8 and not value.isdigit())


def private_keys(data: bytes) -> Iterator[Span]:
    at, last_line = data.find(b"-----BEGIN"), -1
    while at >= 0:
        begin = _BEGIN.match(data, at)
        if begin is None:
            at = data.find(b"-----BEGIN", at + 10)
            continue
        most = min(at + MOST_OF_KEY, len(data))
        if last_line < at:
            found = _END.search(data, begin.end())
            last_line, end = found.span() if found is not None else (len(data), len(data))
        # One that was cut has no last line.
        whole = last_line < len(data) and end <= most
        stop = end if whole else _BODY.match(data, begin.end(), most).end()
        yield Span(at, stop, PRIVATE_KEY)
        at = data.find(b"-----BEGIN", stop)


def is_name_of_secret(name: str, value: str) -> bool:
    """Whether a field of that name holds a secret. A field ``token`` is mostly a piece of a model's text."""
    if len(name) > 64 or (found := _NAME.search(name)) is None or not value:
        return False
    if name[found.end() : found.end() + 1].isalpha():
        return False
    return found[0].lower() != "token" or (len(value) >= 16 and any(each.isdigit() for each in value))
