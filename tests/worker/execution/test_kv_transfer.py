"""Copies between a device's pool and the host's pages, and what becomes of those that fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.page_copy import Copy, page_copier
from worker.engine.plan import Tier, Transfer, TransferResult
from worker.execution.kv_transfer import HostPages

BLOCKS = 12
HOST_BLOCKS = 6


@pytest.fixture
def pool() -> torch.Tensor:
    """Pages of two layers, keys and values, two heads, 16 slots of 8."""
    return torch.randn(BLOCKS, 2, 2, 2, 16, 8, generator=torch.Generator().manual_seed(0))


def store(number: int, *pairs: tuple[int, int]) -> Transfer:
    return Transfer(number, Tier.DEVICE, Tier.HOST, list(pairs))


def load(number: int, *pairs: tuple[int, int]) -> Transfer:
    return Transfer(number, Tier.HOST, Tier.DEVICE, list(pairs))


def finish(pages: HostPages, count: int) -> list[TransferResult]:
    """The next ``count`` results, in the order in which they come."""
    results: list[TransferResult] = []
    limit = time.monotonic() + 30
    while len(results) < count and time.monotonic() < limit:
        results += pages.done()
    assert len(results) == count
    return results


class HeldCopier:
    """The real one, but what a copy came to is told only when the test releases it, or as the error it is given."""

    def __init__(self) -> None:
        self.held: list[HeldCopy] = []
        self._real = page_copier(torch.device("cpu"))

    def copy(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Copy:
        self.held.append(HeldCopy(self._real.copy(source, destination, pairs)))
        return self.held[-1]


class HeldCopy:
    def __init__(self, real: Copy) -> None:
        self.released = False
        self.error: Exception | None = None
        self._real = real

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.released and self._real.done()

    def wait(self) -> None:
        self.released = True
        self._real.wait()


def test_blocks_go_to_the_host_and_come_back_elsewhere(pool: torch.Tensor) -> None:
    pages = HostPages(pool, HOST_BLOCKS)
    before = pool.clone()
    pages.submit(store(7, (3, 5), (4, 0), (5, 1), (6, 2), (11, 3)))
    assert finish(pages, 1) == [TransferResult(7)]
    pool[1:].zero_()
    pages.submit(load(8, (5, 1), (2, 9), (0, 2), (1, 3)))
    assert finish(pages, 1) == [TransferResult(8)]
    for block, was in ((1, 3), (9, 6), (2, 4), (3, 5)):
        assert torch.equal(pool[block], before[was])
    assert not pool[4:9].any()
    assert not pool[10:].any()
    assert torch.equal(pool[0], before[0])
    assert pages.done() == []


def test_transfers_follow_each_other_without_being_asked_for(pool: torch.Tensor) -> None:
    """A block is stored, its host block given to another, and each is read as it was when its turn came."""
    pages = HostPages(pool, HOST_BLOCKS)
    before = pool.clone()
    pages.submit(store(0, (1, 0)))
    pages.submit(load(1, (0, 4)))
    pages.submit(store(2, (2, 0)))
    pages.submit(load(3, (0, 5)))
    assert [result.id for result in finish(pages, 4)] == [0, 1, 2, 3]
    assert torch.equal(pool[4], before[1])
    assert torch.equal(pool[5], before[2])


def test_asking_does_not_wait(pool: torch.Tensor) -> None:
    copier = HeldCopier()
    pages = HostPages(pool, HOST_BLOCKS, copier)
    pages.submit(store(0, (1, 0)))
    pages.submit(store(1, (2, 1)))
    assert pages.done() == []
    copier.held[1].released = True
    assert pages.done() == [], "the second ended, but the first is not known to have"
    copier.held[0].released = True
    assert finish(pages, 2) == [TransferResult(0), TransferResult(1)]


@pytest.mark.parametrize(
    ("transfer", "failed"),
    [
        (lambda: store(1, (1, 0), (2, HOST_BLOCKS), (3, 2)), [HOST_BLOCKS]),
        (lambda: store(1, (1, 0), (BLOCKS, 1)), [1]),
        (lambda: store(1, (0, 1), (1, 0)), [1]),
        (lambda: store(1, (-1, 1)), [1]),
        (lambda: load(1, (4, 1), (4, BLOCKS)), [BLOCKS]),
        (lambda: load(1, (-2, 3), (4, 2)), [3]),
        (lambda: load(1, (4, 0)), [0]),
        (lambda: load(1, (4, 2), (5, 3)), [3]),
    ],
    ids=[
        "no such host block",
        "no such block",
        "the null block stored",
        "a negative block",
        "loaded beyond the pool",
        "a negative host block",
        "the null block written",
        "a host block that nothing filled",
    ],
)
def test_blocks_that_cannot_be_copied_fail_alone(
    pool: torch.Tensor, transfer: Callable[[], Transfer], failed: list[int]
) -> None:
    pages = HostPages(pool, HOST_BLOCKS)
    pages.submit(store(0, (9, 4)))
    finish(pages, 1)
    before = pool.clone()
    asked = transfer()
    pages.submit(asked)
    assert finish(pages, 1) == [TransferResult(1, failed)]
    good = [pair for pair in asked.pairs if pair[1] not in failed]
    # The others were made: loads are seen in the pool, stores when they are brought back.
    if asked.destination is Tier.HOST:
        pages.submit(load(2, *((host, 10) for _, host in good)))
        assert finish(pages, 1) == [TransferResult(2)]
        if good:
            assert torch.equal(pool[10], before[good[-1][0]])
    else:
        for _, block in good:
            assert torch.equal(pool[block], before[9])
    assert torch.equal(pool[0], before[0]), "the null block is nobody's"


def test_a_copy_that_breaks_fails_its_blocks_and_no_others(
    pool: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    copier = HeldCopier()
    pages = HostPages(pool, HOST_BLOCKS, copier)
    pages.submit(store(0, (1, 0), (2, 1)))
    pages.submit(store(1, (3, 2)))
    copier.held[0].error = RuntimeError("the bus is gone")
    copier.held[1].released = True
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        assert finish(pages, 2) == [TransferResult(0, [0, 1]), TransferResult(1)]
    assert "transfer 0 failed" in caplog.text
    assert "the bus is gone" in caplog.text
    # What was to be there is never read for what it is not.
    pages.submit(load(2, (0, 7), (2, 8), (1, 9)))
    copier.held[2].released = True
    assert finish(pages, 1) == [TransferResult(2, [7, 9])]


def test_a_host_block_whose_filling_broke_holds_nothing_any_more(pool: torch.Tensor) -> None:
    copier = HeldCopier()
    pages = HostPages(pool, HOST_BLOCKS, copier)
    pages.submit(store(0, (1, 0)))
    pages.submit(load(1, (0, 5)))
    pages.submit(store(2, (2, 0)))
    pages.submit(load(3, (0, 6)))
    for held in copier.held:
        held.released = True
    copier.held[2].error = RuntimeError("broken")
    assert finish(pages, 4) == [TransferResult(0), TransferResult(1), TransferResult(2, [0]), TransferResult(3, [6])]


def test_a_transfer_must_lead_from_one_tier_to_the_other(pool: torch.Tensor) -> None:
    pages = HostPages(pool, HOST_BLOCKS)
    with pytest.raises(ValueError, match="transfer 3 leads from"):
        pages.submit(Transfer(3, Tier.DEVICE, Tier.DEVICE, [(1, 2)]))
    assert pages.done() == []


def test_another_pool_begins_with_an_empty_host(pool: torch.Tensor) -> None:
    """As when a sleeping engine wakes: what was under way ends and is told, what was kept is gone."""
    copier = HeldCopier()
    pages = HostPages(pool, HOST_BLOCKS, copier)
    pages.submit(store(0, (1, 0)))
    pages.detach()
    pages.detach()
    other = torch.zeros_like(pool)
    pages.attach(other)
    assert finish(pages, 1) == [TransferResult(0)]
    pages.submit(load(1, (0, 3)))
    copier.held[1].released = True
    assert finish(pages, 1) == [TransferResult(1, [3])]
    assert not other.any()
