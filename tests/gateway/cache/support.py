"""What these tests share: questions and answers, a clock that is set, an embedder of word counts, simple guards."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import Counter as Counts
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

import msgspec

from gateway.assembly import AnswerFacts, describe
from gateway.billing.usage import TokenUsage
from gateway.cache.found import Hit, Miss
from gateway.cache.question import Question
from gateway.cache.service import AnswerCache
from gateway.datakeys.data_key import KEY_BYTES, DataKey
from gateway.policies.answer_cache import CacheRules
from gateway.secret_key import SecretKey

SECRET = SecretKey("secret-key-of-the-tests-of-this-room")
TENANT, PROJECT = UUID(int=1), UUID(int=2)
EXACT = CacheRules(mode="exact")
SEMANTIC = CacheRules(mode="semantic", threshold=0.6)
USAGE = TokenUsage(prompt_tokens=11, completion_tokens=7)


class SetClock:
    """Goes only when told to."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._begin = datetime(2026, 5, 4, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self._begin + timedelta(seconds=self.ahead_s)

    def monotonic(self) -> float:
        return self.ahead_s


class MemoryKeys:
    """Data keys that lie in this process alone."""

    def __init__(self) -> None:
        self.owned: dict[tuple[UUID, str | None], DataKey] = {}

    async def key(self, tenant_id: UUID, end_user_hash: str | None) -> DataKey:
        owner = (tenant_id, end_user_hash)
        if owner not in self.owned:
            secret = sha256(repr(owner).encode()).digest()
            self.owned[owner] = DataKey(uuid4(), secret[:KEY_BYTES])
        return self.owned[owner]

    async def by_id(self, tenant_id: UUID, key_id: UUID) -> DataKey | None:
        return next((key for owner, key in self.owned.items() if owner[0] == tenant_id and key.id == key_id), None)


class WordEmbedder:
    """Each word has a direction; a text is the sum of its words."""

    def __init__(self, name: str = "words", dimensions: int = 48) -> None:
        self.name = name
        self.dimensions = dimensions
        self.asked: list[str] = []

    async def embed(self, text: str) -> array[float] | bytes:
        self.asked.append(text)
        total = [1e-6] * self.dimensions
        for word in re.findall(r"\w+", text.casefold()):
            drawn = sha256(f"{self.name} {word}".encode()).digest() * (1 + self.dimensions // 32)
            total = [value + byte - 127.5 for value, byte in zip(total, drawn, strict=False)]
        return array("f", total)


class Rejection(msgspec.Struct, frozen=True):
    guard: str


class NumberGuards:
    """Knows numbers, one word of the present, and ASCII."""

    def check(self, asked: str, kept: str) -> Rejection | None:
        same = re.findall(r"\d+", asked) == re.findall(r"\d+", kept)
        return None if same else Rejection("numbers")

    def speaks_of_now(self, text: str) -> bool:
        return "today" in text.casefold()

    def readable(self, text: str) -> bool:
        return text.isascii()


class Tally:
    """What was counted, as ``name:label=value``."""

    def __init__(self) -> None:
        self.counts: Counts[str] = Counts()

    def count(self, name: str, labels: Mapping[str, str], amount: int = 1) -> None:
        self.counts[":".join([name, *(f"{label}={value}" for label, value in sorted(labels.items()))])] += amount

    def __getitem__(self, key: str) -> int:
        return self.counts[key]


class Room:
    """A cache, and what a test sees and sets of it."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.clock, self.keys, self.tally, self.embedder = SetClock(), MemoryKeys(), Tally(), WordEmbedder()
        parts: dict[str, Any] = {"embedder": self.embedder, "clock": self.clock, "counter": self.tally}
        keys, guards = changes.pop("keys", self.keys), changes.pop("guards", NumberGuards())
        # Long, for a busy machine is no fault of the cache; tests of the limit set their own.
        parts |= {"limit_s": 10.0} | changes
        self.cache = AnswerCache(url, SECRET, keys, guards, describe, **parts)

    async def ask(self, asked: Question) -> Hit | Miss:
        return await self.cache.look_up(asked)

    async def answer(self, asked: Question, text: str = "Yes.", request_id: str = "r1", **facts: Any) -> Miss:
        """Ask, miss, and keep an answer."""
        miss = await self.ask(asked)
        assert isinstance(miss, Miss)
        keep(miss, text, request_id, **facts)
        assert await self.cache.drained(10)
        return miss

    async def found(self, asked: Question) -> str | None:
        """The text of a hit."""
        found = await self.ask(asked)
        return describe(asked.api, found.body).text if isinstance(found, Hit) else None


@asynccontextmanager
async def room(url: str, **changes: Any) -> AsyncIterator[Room]:
    made = Room(url, **changes)
    async with made.cache:
        if made.cache.semantic_fault is None:
            await until_known(made.cache)
        yield made


async def until_known(cache: AnswerCache, within_s: float = 10.0) -> None:

    deadline = time.monotonic() + within_s
    while cache.semantic_available is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def chat(text: str = "How do I reset my password?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"model": "m", "temperature": 0, "messages": messages, **fields}


def body(fields: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])


def question(fields: dict[str, Any] | None = None, rules: CacheRules = EXACT, **changes: Any) -> Question:
    values: dict[str, Any] = {
        "api": "chat_completions",
        "route": "m",
        "version": "1",
        "body": body(chat() if fields is None else fields),
        "tenant_id": TENANT,
        "project_id": PROJECT,
        "end_user": None,
        "rules": rules,
    }
    return Question(**(values | changes))


def completion(text: str = "Yes.", *, finish_reason: str | None = "stop", **message: Any) -> bytes:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text, **message}}
    return msgspec.json.encode({"id": "c1", "object": "chat.completion", "model": "m", "choices": [choice]})


def told(text: str = "Yes.", **message: Any) -> tuple[bytes, TokenUsage, AnswerFacts]:
    """What is told of an answer, but for its request."""
    whole = completion(text, **message)
    return whole, USAGE, describe("chat_completions", whole)


def keep(miss: Miss, text: str = "Yes.", request_id: str = "r1", **message: Any) -> None:
    miss.keep(*told(text, **message), request_id)


def changed(rules: CacheRules, **changes: Any) -> CacheRules:
    return msgspec.structs.replace(rules, **changes)
