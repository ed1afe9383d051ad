from __future__ import annotations

import os

import pytest

from worker.execution import threads


def test_what_the_caller_set_is_kept() -> None:
    wanted = threads.environment(2, {"GOMP_SPINCOUNT": "7", "PATH": "/bin"})
    assert wanted["GOMP_SPINCOUNT"] == "7"
    assert wanted["PATH"] == "/bin"
    assert wanted["OMP_NUM_THREADS"] == wanted["MKL_NUM_THREADS"] == "2"
    assert wanted["THP_MEM_ALLOC_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("count", "usable", "machine", "bound"), [(4, 4, 4, True), (2, 4, 4, False), (4, 4, 8, False), (1, 1, 1, False)]
)
def test_threads_are_bound_only_where_they_fill_the_machine(
    monkeypatch: pytest.MonkeyPatch, count: int, usable: int, machine: int, bound: bool
) -> None:
    monkeypatch.setattr(threads, "default_threads", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert ("OMP_PROC_BIND" in threads.environment(count, {})) is bound
