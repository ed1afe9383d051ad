"""What the runner holds in memory: pool sizes, the host tier, and sleep."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from tests.worker.parity.checkpoints import Checkpoint, make, prompt
from worker.engine.config import EngineConfig
from worker.engine.plan import NewSequence, SamplingParams, Span, StepPlan, Tier, Transfer, TransferResult
from worker.execution import kv_transfer, model_runner

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner

BLOCK = 16
PAGE = 8_192
"""Bytes of a block of the ``gqa`` checkpoint: 2 layers, keys and values, 2 heads of 16, fp32."""

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make("gqa", tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two cache groups: full attention, and windows of 40 tokens."""
    return make("mixed", tmp_path_factory.mktemp("mixed"))


def make_runner(path: Path, **settings: Any) -> ModelRunner:
    from worker.execution.model_runner import ModelRunner

    return ModelRunner(
        EngineConfig(**{"model_path": str(path), "device": "cpu", "threads": 1, "block_size": BLOCK, **settings})
    )


def step(runner: ModelRunner, new: list[NewSequence], spans: list[Span], retired: tuple[int, ...] = ()) -> torch.Tensor:
    """The logits of a step."""
    handle = runner.forward(StepPlan(0, new, spans, list(retired)))
    runner.sample(handle)
    assert handle.logits is not None
    return handle.logits


def finish(runner: ModelRunner, count: int) -> list[TransferResult]:
    results: list[TransferResult] = []
    limit = time.monotonic() + 30
    while len(results) < count and time.monotonic() < limit:
        results += runner.transfers_done()
    assert len(results) == count
    return results


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_pools_have_the_sizes_that_were_asked_for(gqa: Checkpoint) -> None:
    runner = make_runner(gqa.path, kv_cache_bytes=7 * PAGE + 5, host_kv_bytes=3 * PAGE + 5)
    assert (runner.num_blocks, runner.num_host_blocks) == (7, 3)
    assert make_runner(gqa.path, kv_cache_bytes=7 * PAGE).num_host_blocks == 0


def test_a_fitted_pool_holds_no_more_than_can_be_used(gqa: Checkpoint, mixed: Checkpoint) -> None:
    """max_running sequences of the greatest length, and the null block; a window needs fewer blocks."""
    settings = {"max_running": 2, "max_model_len": 320, "max_batched_tokens": 64}
    assert make_runner(gqa.path, **settings).num_blocks == 1 + 2 * 20
    blocks = make_runner(mixed.path, **settings).num_blocks
    assert 1 + 2 * (20 + 5) < blocks < 1 + 2 * (20 + 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_bytes": 2 * PAGE - 1}, rf"kv_cache_bytes of at least {2 * PAGE}, or {33 * PAGE} for the longest"),
        ({"host_kv_bytes": PAGE - 1}, rf"one block takes {PAGE}: give that or more, or 0"),
        ({"host_kv_bytes": 1 << 50}, r"only \d+ bytes of memory are free"),
        ({"kv_cache_bytes": 1 << 50}, r"only \d+ bytes of memory are free"),
        ({"block_size": 8}, "multiple of 16"),
        ({"block_size": 0}, "multiple of 16"),
        ({"block_size": 40}, "multiple of 16"),
        ({"max_model_len": 0}, "1 to 512"),
        ({"max_model_len": 513}, "1 to 512"),
        ({"attention_sinks": 16}, "attention_window"),
        ({"attention_window": 40, "attention_sinks": 8}, "whole number of blocks of 16"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(gqa: Checkpoint, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_runner(gqa.path, **{"kv_cache_bytes": 40 * PAGE, **settings})


def test_a_runner_of_one_token_is_ready(gqa: Checkpoint) -> None:
    runner = make_runner(gqa.path, kv_cache_bytes=4 * PAGE, max_model_len=1)
    logits = step(runner, [NewSequence(1, [7], GREEDY, 1)], [Span(1, 0, 1, [[1]], True)])
    torch.testing.assert_close(logits[0], gqa.logits([7])[0], atol=1e-4, rtol=0)


def test_what_the_engine_must_know(mixed: Checkpoint) -> None:
    runner = make_runner(mixed.path, kv_cache_bytes=40 * PAGE)
    assert [(group.window, group.sinks) for group in runner.cache_groups] == [(40, 0), (None, 0)]
    assert (runner.hidden_size, runner.vocab_size, runner.max_model_len) == (64, 500, 512)
    narrowed = make_runner(mixed.path, kv_cache_bytes=40 * PAGE, attention_window=100, attention_sinks=16)
    assert [(group.window, group.sinks) for group in narrowed.cache_groups] == [(40, 0), (100, 16)]


def test_the_fingerprint_names_what_decides_the_keys_and_values(gqa: Checkpoint, tmp_path: Path) -> None:
    settings = {"kv_cache_bytes": 40 * PAGE}
    first = make_runner(gqa.path, **settings).model_fingerprint
    assert len(bytes.fromhex(first)) == 32
    copy = shutil.copytree(gqa.path, tmp_path / "copy")
    # Neither where the file is nor how the cache is cut matters.
    assert make_runner(copy, kv_cache_bytes=9 * PAGE, block_size=32, max_model_len=64).model_fingerprint == first
    # What a token sees does.
    assert make_runner(copy, attention_window=64, **settings).model_fingerprint != first
    flip_a_weight(copy)
    assert make_runner(copy, **settings).model_fingerprint != first


def flip_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_blocks_evicted_from_the_pool_come_back_from_the_host(mixed: Checkpoint) -> None:
    """Both groups' blocks of a prefix, into other blocks of the pool: the logits are bitwise those of before."""
    runner = make_runner(mixed.path, kv_cache_bytes=40 * PAGE, host_kv_bytes=20 * PAGE, max_batched_tokens=64)
    tokens = prompt(64, 1)
    windowed, full = [11, 14, 3, 12], [5, 2, 9, 4]
    runner.forward(StepPlan(0, [NewSequence(1, tokens, GREEDY, 64)], [Span(1, 0, 48, [windowed, full], False)], []))
    expected = step(runner, [], [Span(1, 48, 16, [], True)])
    stored = [5, 2, 9, 11, 14, 3]
    runner.transfer(Transfer(1, Tier.DEVICE, Tier.HOST, list(zip(stored, [4, 0, 1, 7, 6, 2], strict=True))))
    # A step in between reads the blocks that are being copied, and the next one waits for nothing.
    step(runner, [], [Span(1, 64, 1, [[7], [6]], True)])
    assert finish(runner, 1) == [TransferResult(1)]

    # Others take the blocks.
    strangers = prompt(64, 2)
    step(runner, [NewSequence(2, strangers, GREEDY, 64)], [Span(2, 0, 64, [windowed, full], True)], retired=(1,))
    runner.transfer(
        Transfer(2, Tier.HOST, Tier.DEVICE, [(4, 15), (0, 8), (1, 1), (7, 10), (6, 13), (2, 16)]),
    )
    assert finish(runner, 1) == [TransferResult(2)]
    again = NewSequence(3, tokens, GREEDY, 64)
    logits = step(runner, [again], [Span(3, 48, 16, [[10, 13, 16, 7], [15, 8, 1, 6]], True)], retired=(2,))
    assert torch.equal(logits, expected)


def test_without_a_host_tier_there_are_no_transfers(gqa: Checkpoint) -> None:
    runner = make_runner(gqa.path, kv_cache_bytes=8 * PAGE)
    with pytest.raises(ValueError, match="host_kv_bytes"):
        runner.transfer(Transfer(1, Tier.DEVICE, Tier.HOST, [(1, 0)]))
    assert runner.transfers_done() == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_runner_wakes_as_it_was_but_with_an_empty_cache(mixed: Checkpoint, level: int) -> None:
    runner = make_runner(mixed.path, kv_cache_bytes=40 * PAGE, host_kv_bytes=8 * PAGE)
    before = (runner.num_blocks, runner.num_host_blocks, runner.cache_groups, runner.model_fingerprint)
    tokens = prompt(40, 1)
    blocks = [[1, 2, 3], [4, 5, 6]]
    expected = step(runner, [NewSequence(1, tokens, GREEDY, 40)], [Span(1, 0, 40, blocks, True)])
    runner.transfer(Transfer(1, Tier.DEVICE, Tier.HOST, [(1, 0)]))

    runner.sleep(level)
    runner.sleep(level)
    assert finish(runner, 1) == [TransferResult(1)], "what was under way is still told"
    plan = StepPlan(0, [NewSequence(2, tokens, GREEDY, 40)], [Span(2, 0, 40, blocks, True)], [])
    with pytest.raises(RuntimeError, match="sleeps"):
        runner.forward(plan)
    with pytest.raises(RuntimeError, match="sleeps"):
        runner.transfer(Transfer(2, Tier.DEVICE, Tier.HOST, [(1, 0)]))

    runner.wake()
    runner.wake()
    assert (runner.num_blocks, runner.num_host_blocks, runner.cache_groups, runner.model_fingerprint) == before
    # The sequences are gone: their keys can be used again, and to retire one is no fault.
    plan = StepPlan(0, [NewSequence(1, tokens, GREEDY, 40)], [Span(1, 0, 40, blocks, True)], [1])
    handle = runner.forward(plan)
    assert handle.logits is not None
    assert torch.equal(handle.logits, expected)
    # Nothing that was on the host can be taken for content.
    runner.transfer(Transfer(3, Tier.HOST, Tier.DEVICE, [(0, 7)]))
    assert finish(runner, 1) == [TransferResult(3, [7])]


def test_a_cache_that_comes_back_is_empty(gqa: Checkpoint) -> None:
    """Attending to the blocks of before is attending to zeros, not to what was there."""
    runner = make_runner(gqa.path, kv_cache_bytes=8 * PAGE)
    tokens = prompt(33, 1)
    resumed = NewSequence(2, tokens, GREEDY, 33)
    step(runner, [NewSequence(1, tokens, GREEDY, 33)], [Span(1, 0, 33, [[1, 2, 3]], True)])
    kept = step(runner, [resumed], [Span(2, 32, 1, [[1, 2, 4]], True)], retired=(1,))
    runner.sleep(1)
    runner.wake()
    lost = step(runner, [resumed], [Span(2, 32, 1, [[1, 2, 4]], True)])
    fresh = make_runner(gqa.path, kv_cache_bytes=8 * PAGE)
    assert torch.equal(lost, step(fresh, [resumed], [Span(2, 32, 1, [[1, 2, 4]], True)]))
    assert not torch.equal(lost, kept)


def test_sleep_levels(gqa: Checkpoint) -> None:
    runner = make_runner(gqa.path, kv_cache_bytes=8 * PAGE)
    for level in (0, 3, -1):
        with pytest.raises(ValueError, match=f"sleep level is {level}"):
            runner.sleep(level)
    new, span = NewSequence(1, [1, 2, 3], GREEDY, 3), Span(1, 0, 3, [[1]], True)
    expected = step(runner, [new], [span])
    runner.sleep(1)
    runner.sleep(2)
    runner.wake()
    assert torch.equal(step(runner, [new], [span]), expected)


def test_a_model_that_changed_meanwhile_is_not_taken_for_the_old_one(gqa: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(gqa.path, tmp_path / "model")
    runner = make_runner(folder, kv_cache_bytes=8 * PAGE)
    new, span = NewSequence(1, [1, 2, 3], GREEDY, 3), Span(1, 0, 3, [[1]], True)
    expected = step(runner, [new], [span])
    runner.sleep(2)
    flip_a_weight(folder)
    with pytest.raises(ValueError, match="has changed since the engine started"):
        runner.wake()
    with pytest.raises(RuntimeError, match="sleeps"):
        runner.forward(StepPlan(0, [new], [span], []))
    flip_a_weight(folder)
    runner.wake()
    assert torch.equal(step(runner, [new], [span]), expected)


def test_a_wake_without_room_loses_nothing(gqa: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that were kept are there for the next try, though their file is gone."""
    folder = shutil.copytree(gqa.path, tmp_path / "model")
    runner = make_runner(folder, kv_cache_bytes=8 * PAGE, host_kv_bytes=PAGE)
    new, span = NewSequence(1, [1, 2, 3], GREEDY, 3), Span(1, 0, 3, [[1]], True)
    expected = step(runner, [new], [span])
    runner.sleep(1)
    shutil.rmtree(folder)
    for place, name, error in (
        (model_runner, "PagedCache", torch.OutOfMemoryError),
        (kv_transfer, "host_pages", MemoryError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Mock(side_effect=error("no room")))
            with pytest.raises(MemoryError, match="no room"):
                runner.wake()
        with pytest.raises(RuntimeError, match="sleeps"):
            runner.forward(StepPlan(0, [new], [span], []))
    runner.wake()
    assert torch.equal(step(runner, [new], [span]), expected)


def test_a_context_that_no_memory_holds_is_refused(gqa: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(gqa.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": (1 << 31) - 1}))
    with pytest.raises(ValueError, match=r"need \d+ bytes .*; give a smaller max_model_len"):
        make_runner(folder, kv_cache_bytes=8 * PAGE)
    assert make_runner(folder, kv_cache_bytes=8 * PAGE, max_model_len=99).max_model_len == 99


def test_sleep_gives_the_pool_back(gqa: Checkpoint) -> None:
    blocks = 20_000
    runner = make_runner(gqa.path, kv_cache_bytes=blocks * PAGE, host_kv_bytes=PAGE)
    runner.transfer(Transfer(1, Tier.DEVICE, Tier.HOST, [(1, 0)]))
    runner.transfer(Transfer(2, Tier.HOST, Tier.DEVICE, [(0, block) for block in range(1, blocks)]))
    assert finish(runner, 2) == [TransferResult(1), TransferResult(2)]
    full = resident()
    runner.sleep(1)
    assert full - resident() > 0.8 * blocks * PAGE


def test_deep_sleep_gives_the_weights_back(smollm2_runner: ModelRunner) -> None:
    """135 million of them in fp32 are over 500 MB. After it the model says what it said."""

    def greedy() -> list[int]:
        tokens = [504, 3575, 282, 4649, 314]
        plan = StepPlan(0, [NewSequence(800, tokens, GREEDY, 5)], [Span(800, 0, 5, [[1]], True)], [])
        text = smollm2_runner.sample(smollm2_runner.forward(plan)).result().tokens
        for position in range(5, 10):
            plan = StepPlan(0, [], [Span(800, position, 1, [], True)], [])
            text += smollm2_runner.sample(smollm2_runner.forward(plan)).result().tokens
        smollm2_runner.forget(800)
        return text

    expected = greedy()
    loaded = resident()
    smollm2_runner.sleep(2)
    try:
        asleep = resident()
    finally:
        smollm2_runner.wake()
    assert loaded - asleep > 400_000_000
    assert greedy() == expected
