from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import spool as spool_module
from gateway.admission.redis import RedisError, RedisUnavailable
from gateway.admission.spool import Spool
from gateway.admission.spool_file import HEADER, Reading, Record, SpoolFile, decode_line, encode_line, orphans
from gateway.ids import uuid7

ROOT = Path(__file__).parents[3]


def record(*arguments: bytes | str | int) -> Record:
    return Record(uuid7(), "{s01}", ["{s01}:tenant:x", "{s01}:usage"], list(arguments or (b'{"a":1}', "", 5)))


def contents(folder: Path) -> list[Record]:
    """What the files of processes that ended hold."""
    found: list[Record] = []
    for path in orphans(folder):
        if (file := SpoolFile.adopt(path)) is not None:
            found += [each for batch in file.batches(3, Reading()) for each in batch]
            file.close()
    return found


class Redis:
    """Settles what is replayed, each id once, as the settle script does."""

    def __init__(self, refused: Sequence[UUID] = (), away: Sequence[UUID] = ()) -> None:
        self.settled: list[Record] = []
        self.refused = set(refused)
        self.away = set(away)

    async def settle(self, each: Record) -> None:
        await asyncio.sleep(0)
        if each.request_id in self.refused:
            raise RedisError("ERR no")
        if each.request_id in self.away:
            raise RedisUnavailable("away")
        if each.request_id not in {known.request_id for known in self.settled}:
            self.settled.append(each)


arguments = st.lists(st.binary(max_size=40) | st.text(max_size=40) | st.integers(-(2**53), 2**53), max_size=6)
records = st.lists(
    st.builds(Record, st.uuids(), st.text(max_size=9), st.lists(st.text(), max_size=3), arguments),
    unique_by=lambda each: each.request_id,
)


@settings(max_examples=40)
@given(
    written=records,
    cut=st.integers(min_value=0, max_value=200),
    garbage=st.binary(max_size=60).filter(lambda tail: b"\n" not in tail),
)
def test_what_was_synced_is_replayed_whatever_a_crash_did_to_the_end(
    written: list[Record], cut: int, garbage: bytes
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = SpoolFile.create(folder)
        lines = [encode_line(each) for each in written]
        file.append(b"".join(lines))
        file.close()
        (path,) = orphans(folder)
        # A crash tears the line that was being written, which comes after all that was synced.
        torn = encode_line(record("torn"))[:cut]
        whole = torn.endswith(b"\n")
        path.write_bytes(path.read_bytes() + torn + garbage)
        redis = Redis()

        async def replay() -> None:
            spool = Spool(folder)
            await spool.replay(redis.settle)
            await spool.close()

        asyncio.run(replay())
        assert redis.settled[: len(written)] == written
        assert len(redis.settled) - len(written) == whole
        assert orphans(folder) == []


@given(line=st.binary(max_size=80), at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_damaged_line_is_no_settlement(line: bytes, at: int, bit: int) -> None:
    assert decode_line(line) is None
    good = bytearray(encode_line(record()))
    good[at % len(good)] ^= 1 << bit
    damaged = decode_line(bytes(good))
    # Only the case of the checksum's hexadecimal digits does not count.
    assert damaged is None or bytes(good).lower() == encode_line(damaged).lower()


async def test_it_is_on_disk_when_it_is_called_safe_and_gone_when_it_landed(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "deep" / "spool")
    several = [record(b"\x00\xff", "text", -3) for _ in range(20)]
    await asyncio.gather(*map(spool.keep, several))
    await spool.keep(several[0])
    assert spool.safe == 20
    (path,) = orphans(tmp_path / "deep" / "spool")
    assert path.stat().st_mode & 0o077 == 0
    assert len(path.read_bytes().splitlines()) == 21
    assert SpoolFile.adopt(path) is None  # it is in use
    for each in several[1:]:
        spool.landed(each.request_id)
    assert len(path.read_bytes().splitlines()) == 21
    spool.landed(several[0].request_id)
    last = record()
    await spool.keep(last)
    (other,) = orphans(tmp_path / "deep" / "spool")
    assert other != path
    assert other.read_bytes() == HEADER + encode_line(last)
    spool.landed(last.request_id)
    await spool.close()
    assert orphans(tmp_path / "deep" / "spool") == []


async def test_nothing_is_touched_while_nothing_fails(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.landed(uuid7())
    assert await spool.replay(Redis().settle) == 0
    await spool.close()
    assert not (tmp_path / "spool").exists()


async def test_what_did_not_land_is_left_to_the_next_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    left, landed = record(), record()
    await asyncio.gather(spool.keep(left), spool.keep(landed))
    spool.landed(landed.request_id)
    await spool.close()
    redis, successor = Redis(), Spool(tmp_path)
    assert await successor.replay(redis.settle) == 2  # that the second landed is not written down, and harmless
    assert redis.settled == [left, landed]
    assert await successor.replay(redis.settle) == 0
    await successor.close()


async def test_a_file_stays_until_all_of_it_has_landed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "BATCH", 4)
    spool, several = Spool(tmp_path), [record() for _ in range(10)]
    for each in several:
        await spool.keep(each)
    await spool.close()
    redis, successor = Redis(refused=[several[2].request_id], away=[several[9].request_id]), Spool(tmp_path)
    assert await successor.replay(redis.settle) == 8
    assert await successor.replay(redis.settle) == 8
    assert contents(tmp_path) == several
    redis.refused, redis.away = set(), set()
    assert await successor.replay(redis.settle) == 10
    assert {each.request_id for each in redis.settled} == {each.request_id for each in several}
    assert len(redis.settled) == 10
    assert orphans(tmp_path) == []
    await successor.close()


async def test_two_successors_do_not_share_a_file(tmp_path: Path) -> None:
    spool, one = Spool(tmp_path), record()
    await spool.keep(one)
    await spool.close()
    redis, first, second = Redis(), Spool(tmp_path), Spool(tmp_path)
    assert sum(await asyncio.gather(first.replay(redis.settle), second.replay(redis.settle))) == 1
    await asyncio.gather(first.close(), second.close())


async def test_a_disk_that_cannot_be_written_leaves_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True
    write = os.pwrite

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if full:
            write(descriptor, data[: len(data) // 2], at)
            raise OSError(28, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    spool, one, two = Spool(tmp_path), record(), record()
    await spool.keep(one)
    await spool.keep(one)
    assert spool.safe == 0
    assert sum("memory alone" in each.message for each in caplog.records) == 1
    full = False
    await spool.keep(two)
    full = True
    await spool.keep(one)
    assert spool.safe == 1
    full = False
    await spool.keep(one)
    assert spool.safe == 2
    await spool.close()
    assert contents(tmp_path) == [two, one]


async def test_a_folder_that_cannot_be_made_leaves_it_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file")
    await spool.keep(record())
    assert spool.safe == 0
    with pytest.raises(NotADirectoryError):
        await spool.replay(Redis().settle)
    await spool.close()


async def test_a_file_deleted_under_its_owner_is_written_anew(tmp_path: Path) -> None:
    spool, one, two = Spool(tmp_path), record(), record()
    await spool.keep(one)
    orphans(tmp_path)[0].unlink()
    await spool.keep(two)
    await spool.close()
    assert contents(tmp_path) == [one, two]


async def test_a_long_file_is_shortened_to_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "COMPACT_BYTES", 2000)
    spool, first = Spool(tmp_path), record()
    await spool.keep(first)
    for _ in range(100):
        passing = record()
        await spool.keep(passing)
        spool.landed(passing.request_id)
        (path,) = orphans(tmp_path)
        assert path.stat().st_size < 2500
    await spool.close()
    assert first in contents(tmp_path)


async def test_a_damaged_file_is_kept_and_the_rest_of_it_settled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = record(), record()
    (tmp_path / "x.spool").write_bytes(HEADER + encode_line(before) + b"00 zero\n" + encode_line(after))
    redis, spool = Redis(), Spool(tmp_path)
    assert await spool.replay(redis.settle) == 2
    assert redis.settled == [before, after]
    assert (tmp_path / "x.damaged").exists()
    assert "1 lines of a spool file are damaged" in caplog.text
    await spool.close()


async def test_a_file_of_another_release_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.spool"
    path.write_bytes(b"penstock spool 999\n" + encode_line(record()))
    spool = Spool(tmp_path)
    for _ in range(2):
        assert await spool.replay(Redis().settle) == 0
    assert path.exists()
    assert sum("another release" in each.message for each in caplog.records) == 1
    await spool.close()


WRITER = """
import asyncio, os, sys
from pathlib import Path
from gateway.admission.spool import Spool
from tests.gateway.admission.test_spool import record

async def main():
    spool = Spool(Path(sys.argv[1]))
    sync, calls = os.fsync, 0
    def fsync(descriptor):
        nonlocal calls
        calls += 1
        if calls > 6:  # what was appended before it is not safe
            print("hangs", flush=True)
            import time; time.sleep(600)
        sync(descriptor)
    os.fsync = fsync
    while True:
        several = [record() for _ in range(5)]
        for each in several:
            print("begun", each.request_id, flush=True)
        await asyncio.gather(*map(spool.keep, several))
        for each in several:
            print("safe", each.request_id, flush=True)

asyncio.run(main())
"""


def killed_while_it_syncs(folder: Path) -> dict[str, set[str]]:
    """Ids that a process had begun to keep and had been told were safe when it was killed between append and sync."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    told: dict[str, set[str]] = {"begun": set(), "safe": set()}
    for line in process.stdout:
        kind, *rest = line.decode().split()
        if kind == "hangs":
            break
        told[kind].add(rest[0])
    process.kill()
    process.wait()
    process.stdout.close()
    return told


async def test_a_kill_between_append_and_sync_loses_nothing_that_was_called_safe(tmp_path: Path) -> None:
    told = await asyncio.to_thread(killed_while_it_syncs, tmp_path)
    redis, spool = Redis(), Spool(tmp_path)
    await spool.replay(redis.settle)
    replayed = {str(each.request_id) for each in redis.settled}
    assert len(told["safe"]) >= 10
    assert told["safe"] <= replayed <= told["begun"]
    assert orphans(tmp_path) == []
    await spool.close()


def test_any_kind_of_argument_comes_back_as_it_went() -> None:
    values: list[Any] = [b"\x00\n\xff", "", "ü\n", 0, -1, 2**53 - 1]
    assert decode_line(encode_line(record(*values))).arguments == values  # type: ignore[union-attr]
