"""The host tier's memory: pages beside the device's pool, and the copies between the two.

Which content lies where is the engine's business (``worker/engine/kv_connector.py``); here are only pages.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import torch

from kernels.page_copy import Copy, PageCopier, host_pages, page_copier, page_rows
from worker.engine.plan import NULL_BLOCK, Tier, Transfer, TransferResult

log = logging.getLogger("penstock.engine")


@dataclass(slots=True)
class _Running:
    transfer: Transfer
    pairs: list[tuple[int, int]]
    """Those of the transfer that can be made."""
    copy: Copy | None
    """None if nothing could be begun."""


class HostPages:
    """Pages of host memory beside a device's pool, ``[num_blocks]`` of them, and the transfers between the two.

    ``pool`` ``[blocks, ...]``: the device's pages. Transfers end in the order in which they were submitted. What goes
    wrong fails blocks, not the engine: their content is computed again. A host block that no transfer has filled since
    this tier was made, or whose last filling failed, fails when it is read.
    """

    def __init__(self, pool: torch.Tensor, num_blocks: int, copier: PageCopier | None = None) -> None:
        self._num_blocks = num_blocks
        self._rows: dict[Tier, torch.Tensor] = {}
        self.attach(pool)
        self._copier = page_copier(pool.device) if copier is None else copier
        self._running: deque[_Running] = deque()
        self._ended: list[TransferResult] = []
        self._filled: set[int] = set()

    def detach(self) -> None:
        """Wait for every transfer, then give up the host's pages and let go of the pool. How the transfers ended is
        still told by ``done``. Nothing happens the second time."""
        for running in self._running:
            if running.copy is not None:
                running.copy.wait()
        self._ended = self.done()
        self._rows.clear()
        self._filled.clear()

    def attach(self, pool: torch.Tensor) -> None:
        """Go on with a pool of such pages, and empty pages of the host."""
        rows = page_rows(pool)
        self._rows = {Tier.DEVICE: rows, Tier.HOST: host_pages(self._num_blocks, rows.shape[1], pool.device)}

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer. Raises ``ValueError`` if it does not lead from one tier to the other."""
        if {transfer.source, transfer.destination} != {Tier.DEVICE, Tier.HOST}:
            raise ValueError(f"transfer {transfer.id} leads from {transfer.source!r} to {transfer.destination!r}")
        source, destination = self._rows[transfer.source], self._rows[transfer.destination]
        pairs = [
            (a, b)
            for a, b in transfer.pairs
            if _exists(transfer.source, a, source) and _exists(transfer.destination, b, destination)
        ]
        if len(pairs) < len(transfer.pairs):
            log.error("transfer %d names blocks that there are not: %s", transfer.id, transfer.pairs)
        copy = None
        try:
            copy = self._copier.copy(source, destination, pairs)
        except RuntimeError:
            log.exception("transfer %d could not begin; its blocks will be computed again", transfer.id)
        self._running.append(_Running(transfer, pairs, copy))

    def done(self) -> list[TransferResult]:
        """The transfers that have ended since the last call, without waiting."""
        results, self._ended = self._ended, []
        while self._running:
            running = self._running[0]
            ended, good = _outcome(running)
            if not ended:
                break
            self._running.popleft()
            results.append(self._result(running, good))
        return results

    def _result(self, running: _Running, good: bool) -> TransferResult:
        transfer = running.transfer
        copied = running.pairs if good else []
        if transfer.destination is Tier.HOST:
            self._filled.difference_update(block for _, block in transfer.pairs)
            self._filled.update(block for _, block in copied)
        else:
            copied = [(source, block) for source, block in copied if source in self._filled]
        whole = {block for _, block in copied}
        return TransferResult(transfer.id, [block for _, block in transfer.pairs if block not in whole])


def _exists(tier: Tier, block: int, rows: torch.Tensor) -> bool:
    return 0 <= block < rows.shape[0] and (tier is Tier.HOST or block != NULL_BLOCK)


def _outcome(running: _Running) -> tuple[bool, bool]:
    """Whether a transfer has ended, and well."""
    if running.copy is None:
        return True, False
    try:
        ended = running.copy.done()
    except Exception:
        log.exception("transfer %d failed; its blocks will be computed again", running.transfer.id)
        return True, False
    return ended, ended
