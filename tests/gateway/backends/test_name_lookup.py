"""One look-up of a name at a time, believed for a while."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gateway.backends import name_lookup
from gateway.backends.name_lookup import NameLookup

FIRST = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))
SECOND = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 80))


class Names:
    """A name server in the event loop's place for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.fails = 0
        self.found = [FIRST, SECOND]

    async def getaddrinfo(self, host: str, port: int, **more: Any) -> list[Any]:
        self.asked.append(host)
        await self.answers.wait()
        if self.fails:
            raise socket.gaierror(self.fails, "no answer")
        return list(self.found)


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    return names


async def waiting(count: int, lookup: NameLookup) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.ensure_future(lookup.addresses("a", 80)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


async def test_many_wait_for_one_and_each_address_comes_first_in_turn(names: Names) -> None:
    lookup = NameLookup(asyncio.get_running_loop())
    tasks = await waiting(3, lookup)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    names.answers.set()
    assert await tasks[1] == [FIRST, SECOND]
    assert await tasks[2] == [SECOND, FIRST]
    assert await lookup.addresses("a", 80) == [FIRST, SECOND]
    assert names.asked == ["a"]


async def test_what_is_known_is_asked_anew_after_a_while(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "KNOWN_FOR_S", 0.0)
    lookup = NameLookup(asyncio.get_running_loop())
    names.answers.set()
    for _ in range(2):
        assert await lookup.addresses("a", 80) == [FIRST, SECOND]
    assert names.asked == ["a", "a"]


async def test_a_failure_is_told_to_all_and_not_kept(names: Names) -> None:
    lookup = NameLookup(asyncio.get_running_loop())
    names.fails = socket.EAI_NONAME
    tasks = await waiting(2, lookup)
    names.answers.set()
    for task in tasks:
        with pytest.raises(socket.gaierror):
            await task
    names.fails = 0
    assert await lookup.addresses("a", 80) == [FIRST, SECOND]


@pytest.mark.parametrize("ending", ["silent", "for the moment", "cancelled"])
async def test_what_was_known_is_used_while_no_name_server_answers(
    names: Names, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(name_lookup, "KNOWN_FOR_S", 0.0)
    monkeypatch.setattr(name_lookup, "PATIENCE_S", 0.01 if ending == "silent" else 5.0)
    lookup = NameLookup(asyncio.get_running_loop())
    names.answers.set()
    assert await lookup.addresses("a", 80) == [FIRST, SECOND]
    if ending == "for the moment":
        names.fails = socket.EAI_AGAIN
    else:
        names.answers.clear()
    if ending == "cancelled":
        (task,) = await waiting(1, lookup)
        lookup.close()
        with pytest.raises(OSError, match="closed"):
            await task
        return
    for expected in ([SECOND, FIRST], [FIRST, SECOND]):
        assert await lookup.addresses("a", 80) == expected
    assert names.asked == (["a", "a"] if ending == "silent" else ["a", "a", "a"])
    monkeypatch.setattr(name_lookup, "KNOWN_FOR_S", 10.0)
    await lookup.addresses("a", 80)
    asked = len(names.asked)
    await lookup.addresses("a", 80)
    assert len(names.asked) == asked
    lookup.close()
    await asyncio.sleep(0)


async def test_a_name_that_is_no_more_is_forgotten(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "KNOWN_FOR_S", 0.0)
    lookup = NameLookup(asyncio.get_running_loop())
    names.answers.set()
    await lookup.addresses("a", 80)
    for fault in (socket.EAI_NONAME, socket.EAI_AGAIN):
        names.fails = fault
        with pytest.raises(socket.gaierror):
            await lookup.addresses("a", 80)


async def test_what_was_known_long_ago_is_not_used(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "KNOWN_FOR_S", 0.0)
    monkeypatch.setattr(name_lookup, "STILL_USED_S", 0.0)
    lookup = NameLookup(asyncio.get_running_loop())
    names.answers.set()
    await lookup.addresses("a", 80)
    names.fails = socket.EAI_AGAIN
    with pytest.raises(socket.gaierror):
        await lookup.addresses("a", 80)


async def test_a_name_without_addresses_is_a_failure(names: Names) -> None:
    lookup = NameLookup(asyncio.get_running_loop())
    names.found = []
    names.answers.set()
    for _ in range(2):
        with pytest.raises(OSError, match="without an address"):
            await lookup.addresses("a", 80)


async def test_a_failure_that_nobody_waits_for_is_none(names: Names) -> None:
    lookup = NameLookup(asyncio.get_running_loop())
    (task,) = await waiting(1, lookup)
    task.cancel()
    await asyncio.wait([task])
    names.fails = socket.EAI_NONAME
    names.answers.set()
    await asyncio.sleep(0.01)
    assert not lookup._asking


async def test_closing_ends_what_is_asked(names: Names) -> None:
    lookup = NameLookup(asyncio.get_running_loop())
    (task,) = await waiting(1, lookup)
    lookup.close()
    with pytest.raises(OSError, match="closed"):
        await task


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
async def test_an_address_needs_no_look_up(names: Names, host: str, family: int) -> None:
    ((found, *_, address),) = await NameLookup(asyncio.get_running_loop()).addresses(host, 80)
    assert (found, address[:2]) == (family, (host, 80))
    assert not names.asked
