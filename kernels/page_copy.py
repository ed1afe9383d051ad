"""Copies of whole KV pages between a device's pool and host memory, made beside the steps that run meanwhile.

On CUDA a stream of its own copies from and to pinned memory; on CPU, a thread. Either makes its copies one after the
other, in the order in which they were asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch


class Copy(Protocol):
    """Copies under way."""

    def done(self) -> bool:
        """Whether they have ended, without waiting. Raises what made them fail."""
        ...

    def wait(self) -> None:
        """Until they have ended; how is told by ``done``."""
        ...


class PageCopier(Protocol):
    """Copies pages in the background, after the device's work that was submitted before."""

    def copy(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Copy:
        """Begin to copy ``source[a]`` to ``destination[b]`` for each pair ``(a, b)``; both ``[pages, bytes]`` uint8, of
        ``page_rows`` or ``host_pages``. Neither may be written meanwhile, but by this copier."""
        ...


def page_copier(device: torch.device) -> PageCopier:
    """The copier between ``device`` and the host."""
    return _StreamCopier(device) if device.type == "cuda" else _ThreadCopier()


def page_rows(pages: torch.Tensor) -> torch.Tensor:
    """A pool's pages ``[pages, ...]``, contiguous, as bytes: a view ``[pages, bytes]`` uint8."""
    return pages.view(pages.shape[0], -1).view(torch.uint8)


def host_pages(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed host memory for ``[num_pages, page_bytes]`` uint8. For CPU it is taken from the system as it is written;
    for CUDA all of it is taken now and pinned, so that copies need no help of the processor. Raises ``RuntimeError`` if
    it can't be pinned."""
    # Zeroed: a page that nothing has filled may be copied before that is noticed, and attention multiplies what it
    # masks out by zero: it must be finite.
    pages = torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
    if device.type == "cuda":
        # torch's own pinned memory is rounded up to a power of two, and kept when it is freed.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(pages.data_ptr(), pages.nbytes, 0))
        weakref.finalize(pages, runtime.cudaHostUnregister, pages.data_ptr())
    return pages


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs that follow each other on both sides as one piece: (first source, first destination, count)."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in pairs:
        if runs:
            first, to, count = runs[-1]
            if (source, destination) == (first + count, to + count):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((source, destination, 1))
    return runs


class _StreamCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class _StreamCopier:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def copy(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for first, to, count in _runs(pairs):
                destination[to : to + count].copy_(source[first : first + count], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _StreamCopy(event)


class _ThreadCopy:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self) -> None:
        self._future.exception()


class _ThreadCopier:
    """On CPU the device's work has been done when a call for it returns: there is nothing to wait for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-copy")

    def copy(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Copy:
        # numpy copies with one thread and without the interpreter's lock; torch would start a team of threads that
        # compete with those of the step.
        rows, places = source.numpy(), destination.numpy()

        def work() -> None:
            for first, to, count in _runs(pairs):
                places[to : to + count] = rows[first : first + count]

        return _ThreadCopy(self._thread.submit(work))
