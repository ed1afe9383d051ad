from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from gateway.backends.alarm import Alarm

SOON = 0.02


@pytest.fixture
async def alarm() -> Alarm:
    return Alarm(asyncio.get_running_loop())


def after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_wait_in_time_is_let_be_and_the_next_one_has_a_limit_of_its_own(alarm: Alarm) -> None:
    for _ in range(3):
        with alarm.at(after(SOON)):
            await asyncio.sleep(0)
        with alarm.at(after(60)):
            await asyncio.sleep(2 * SOON)  # the timer of the wait before rings in it
    with pytest.raises(TimeoutError), alarm.at(after(SOON)):
        await asyncio.sleep(60)
    with alarm.at(after(60)):
        await asyncio.sleep(0)
    alarm.close()


async def test_a_shorter_limit_than_that_of_the_wait_before_counts(alarm: Alarm) -> None:
    with alarm.at(after(60)):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError) as told, alarm.at(after(SOON)):
            await asyncio.sleep(60)
    assert isinstance(told.value.__cause__, asyncio.CancelledError)
    alarm.close()


async def test_a_limit_that_has_passed_already_ends_the_wait(alarm: Alarm) -> None:
    with pytest.raises(TimeoutError), alarm.at(after(-1)):
        await asyncio.sleep(60)
    alarm.close()


async def test_who_is_cancelled_is_cancelled_though_the_limit_passes_too(alarm: Alarm) -> None:
    async def wait() -> None:
        with alarm.at(after(SOON)):
            await asyncio.sleep(60)

    for late in (False, True):
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        if late:  # in the turn in which it rings
            asyncio.get_running_loop().call_at(after(SOON), task.cancel)
        else:
            task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(outcome, asyncio.CancelledError)
    alarm.close()


async def test_other_faults_come_through(alarm: Alarm) -> None:
    with pytest.raises(LookupError), alarm.at(after(60)):
        raise LookupError
    alarm.close()
    await asyncio.sleep(0)


async def test_a_closed_one_is_gone_without_the_collector(alarm: Alarm) -> None:
    class Kept(Alarm):
        __slots__ = ("__weakref__",)

    gc.disable()
    try:
        kept = Kept(asyncio.get_running_loop())
        with kept.at(after(60)):
            await asyncio.sleep(0)
        kept.close()
        ref = weakref.ref(kept)
        del kept
        assert ref() is None
    finally:
        gc.enable()
