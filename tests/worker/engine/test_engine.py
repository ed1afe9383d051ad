from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.worker.engine.asking import Clock, drain, engine, request, tokens_of
from tests.worker.engine.toy_runner import VOCAB_SIZE, embedding_of, next_token, text_alone
from worker.engine.engine import refusal
from worker.engine.messages import Control, Grammar
from worker.engine.plan import SamplingParams, TokenMasks
from worker.engine.request import ControlRefused, GrammarFailed, RequestRejected
from worker.protocol.kv_events import BlockStored, CacheCleared

JSON = Grammar("regex", "[0-9]+")


class EvenTokens:
    """A grammar of even tokens that is complete after the third; compiles when told to."""

    def __init__(self) -> None:
        self.compiling: list[str] = []
        self.finished: list[tuple[str, str | None]] = []
        self.taken: dict[str, list[int]] = {}
        self.dropped: list[str] = []
        self.fail_at: int | None = None

    @property
    def pending(self) -> int:
        return len(self.compiling) + len(self.finished)

    def compile(self, error: str | None = None) -> None:
        self.finished += [(name, error) for name in self.compiling]
        self.compiling.clear()

    def start(self, request_id: str, grammar: Grammar) -> None:
        self.compiling.append(request_id)
        self.taken[request_id] = []

    def ready(self) -> list[tuple[str, str | None]]:
        finished, self.finished = self.finished, []
        return finished

    def masks(self, sampled: Any) -> TokenMasks:
        for _, request_id in sampled:
            assert request_id in self.taken
        words = -(-VOCAB_SIZE // 32)
        bits = np.full((len(sampled), words), 0x55555555, np.int32)
        return TokenMasks([row for row, _ in sampled], bits)

    def accept(self, request_id: str, token_id: int) -> bool:
        taken = self.taken[request_id]
        if len(taken) == self.fail_at:
            raise GrammarFailed("The grammar leads nowhere.")
        assert token_id % 2 == 0
        taken.append(token_id)
        return len(taken) == 3

    def drop(self, request_id: str) -> None:
        del self.taken[request_id]
        self.dropped.append(request_id)


def even_text(prompt: list[int], seed: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        token = next_token(tokens, SamplingParams(seed=seed))
        tokens.append((token + token % 2) % VOCAB_SIZE)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_holds_its_request_until_it_is_compiled_then_masks_and_ends_it(overlap: bool) -> None:
    grammars = EvenTokens()
    made, _ = engine(overlap=overlap, grammars=lambda: grammars)
    free = request("free", 6, 12, seed=1)
    made.add(request("held", 6, 9, grammar=JSON))
    made.add(free)
    for _ in range(3):
        assert {output.request_id for output in made.step()} <= {"free"}
    assert made.stats.waiting == 1
    grammars.compile()
    outputs = drain(made)
    held = outputs["held"]
    assert tokens_of(held) == even_text(request("held", 6).prompt_token_ids, 0, 3)
    assert (held[-1].finish_reason, held[-1].stop_token_id) == ("stop", None)
    assert (
        tokens_of(outputs["free"])[-5:]
        == text_alone(request("", 6, seed=1).prompt_token_ids, SamplingParams(seed=1), 12)[0][-5:]
    )
    assert grammars.dropped == ["held"]


def test_a_request_with_a_grammar_is_never_in_flight_twice() -> None:
    grammars = EvenTokens()
    made, runner = engine(overlap=True, grammars=lambda: grammars)
    made.add(request("a", 6, 9, grammar=JSON))
    grammars.compile()
    flights = []
    while made.has_work:
        made.step()
        flights.append(len(runner.unread))
    assert max(flights) == 1
    assert len(runner.steps) == 3


def test_a_grammar_that_cannot_be_compiled_or_followed_ends_its_request_with_the_reason() -> None:
    grammars = EvenTokens()
    made, _ = engine(grammars=lambda: grammars)
    made.add(request("a", 6, 9, grammar=JSON))
    assert made.wait_s == 0.0
    made.step()
    assert 0 < (made.wait_s or 0) < 0.1  # nothing to run: it looks again soon
    grammars.compile("unbalanced parenthesis")
    (output,) = drain(made)["a"]
    assert (output.finish_reason, output.error_kind, output.error) == ("error", "grammar", "unbalanced parenthesis")
    grammars.fail_at = 1
    made.add(request("b", 6, 9, grammar=JSON))
    grammars.compile()
    first, last = drain(made)["b"]
    assert len(first.token_ids) == 1
    assert (last.token_ids, last.error_kind, last.error) == ([], "grammar", "The grammar leads nowhere.")
    assert grammars.dropped == ["a", "b"]
    assert made.wait_s is None


def test_a_stop_token_that_the_grammar_does_not_allow_is_no_end() -> None:
    """Where nothing may follow, an end of sequence is drawn all the same."""
    grammars = EvenTokens()
    grammars.fail_at = 0
    made, _ = engine(grammars=lambda: grammars)
    made.add(request("a", 6, 9, grammar=JSON, stop=range(VOCAB_SIZE)))
    grammars.compile()
    (last,) = drain(made)["a"]
    assert (last.token_ids, last.finish_reason, last.error_kind) == ([], "error", "grammar")


def test_a_held_request_can_be_aborted() -> None:
    grammars = EvenTokens()
    made, _ = engine(grammars=lambda: grammars)
    made.add(request("a", 6, 9, grammar=JSON))
    made.step()
    assert [output.finish_reason for output in made.abort(["a", "unknown"])] == ["abort"]
    grammars.compile()
    assert not made.has_work
    made.step()
    assert made.stats.waiting == 0
    assert grammars.dropped == ["a"]


def test_a_grammar_survives_preemption() -> None:
    grammars = EvenTokens()
    made, _ = engine(grammars=lambda: grammars, toy={"num_blocks": 5}, max_running=2)  # 4 blocks of 4
    made.add(request("old", 3, 12, seed=1))
    made.step()
    made.add(request("a", 7, 9, grammar=JSON))
    grammars.compile()
    outputs = drain(made)
    assert made.stats.preemptions >= 1
    assert tokens_of(outputs["a"]) == even_text(request("a", 7).prompt_token_ids, 0, 3)


def test_the_same_system_prompt_is_computed_once_but_not_for_another_salt() -> None:
    made, _ = engine(max_batched_tokens=512, toy={"num_blocks": 3000, "block_size": 16})
    system = [(11 * i) % 1000 for i in range(4000)]
    computed = []
    for name, salt in [("first", "a"), ("second", "a"), ("other", "b")]:
        before = made.stats.computed_tokens
        made.add(request(name, [*system, *range(10)], 1, salt=salt))
        outputs = drain(made)[name]
        computed.append(made.stats.computed_tokens - before)
        assert outputs[0].cached_tokens == 4010 - computed[-1]
    assert computed[0] == 4010
    assert computed[1] < 0.05 * computed[0]
    assert computed[2] == 4010
    assert made.stats.cache_queries == 3 * 4010
    assert made.stats.cache_hits == 4000


def test_prompt_logprobs_and_mean_pooling_compute_everything() -> None:
    made, _ = engine(max_batched_tokens=64)
    prompt = list(range(40))
    for name, more in [
        ("warm", {}),
        ("logprobs", {"sampling": SamplingParams(prompt_logprobs=0)}),
        ("mean", {"pooling": "mean"}),
        ("last", {"pooling": "last"}),
    ]:
        made.add(request(name, prompt, 0 if "pooling" in more else 1, **more))
        (output,) = drain(made)[name]
        assert output.cached_tokens == (36 if name == "last" else 0)
        if "pooling" in more:
            assert (output.embedding, output.finish_reason) == (embedding_of(prompt, more["pooling"]), "stop")
            assert output.prefilled == 40
    assert made.stats.cache_queries == 80


def test_an_evicted_prefix_comes_back_from_the_host_tier_and_what_failed_is_computed_anew() -> None:
    made, runner = engine(
        max_batched_tokens=64, toy={"num_blocks": 16, "host_blocks": 200, "transfer_polls": 3}, max_running=2
    )
    asked = request("again", 32, 4)
    for index in range(4):  # each takes most of the pool
        made.add(request(f"r{index}", 32, 4, seed=index))
        drain(made)
    for _ in range(5):
        made.step()
    made.add(asked)
    made.step()
    assert made.stats.waiting_for_kv == 1
    assert made.wait_s == 0.002
    outputs = drain(made)["again"]
    assert tokens_of(outputs) == text_alone(asked.prompt_token_ids, asked.sampling, 4)[0]
    assert outputs[0].cached_tokens == made.stats.host_hits == 28
    runner._fail_every = 4
    made.add(request("flush", 48, 4, seed=9))
    drain(made)
    before = made.stats
    made.add(request("third", 32, 4))
    outputs = drain(made)["third"]
    assert runner.failed > 0
    assert tokens_of(outputs) == text_alone(asked.prompt_token_ids, asked.sampling, 4)[0]
    cached = outputs[0].cached_tokens or 0
    assert cached < 28
    assert made.stats.cache_hits - before.cache_hits == cached
    assert made.stats.computed_tokens - before.computed_tokens == 32 - cached + 3
    assert 0 <= made.stats.host_hits - before.host_hits <= cached


def test_a_request_that_waits_for_kv_can_be_aborted() -> None:
    made, _ = engine(max_batched_tokens=64, toy={"num_blocks": 16, "host_blocks": 200, "transfer_polls": 3})
    for index in range(4):
        made.add(request(f"r{index}", 32, 4, seed=index))
        drain(made)
    for _ in range(5):
        made.step()
    made.add(request("again", 32, 4))
    made.step()
    assert made.stats.waiting_for_kv == 1
    assert [output.finish_reason for output in made.abort(["again"])] == ["abort"]
    assert made.wait_s == 0.002  # the transfer is still looked after
    for _ in range(5):
        made.step()
    assert made.wait_s is None
    assert made.stats.kv_usage == 0


def test_a_request_that_waits_too_long_ends_with_an_error_and_one_that_lives_too_long_by_length() -> None:
    clock = Clock()
    made, _ = engine(clock=clock, max_running=1, queue_timeout_s=5.0, deadline_s=60.0)
    made.add(request("runs", 4, 50, deadline_s=20.0))
    made.add(request("default", 4, 2))
    made.add(request("patient", 4, 2, queue_timeout_s=100.0))
    made.step()
    clock.now += 5.0
    ended = {output.request_id: output for output in made.step() if output.finish_reason}
    assert list(ended) == ["default"]
    assert (ended["default"].error_kind, ended["default"].finish_reason) == ("queue_timeout", "error")
    clock.now += 15.0
    outputs = drain(made)
    assert (outputs["runs"][0].finish_reason, outputs["runs"][0].token_ids) == ("length", [])
    (first, _) = outputs["patient"]
    assert first.queued_us == 20_000_000
    made.add(request("late", 4, 50, queue_timeout_s=100.0))
    made.add(request("never ran", 4, 50, queue_timeout_s=100.0))
    made.step()
    clock.now += 60.0
    assert {o.request_id: o.finish_reason for o in made.step()} == {"late": "length", "never ran": "length"}
    assert not made.has_work


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    made, _ = engine(deadline_s=1e6)
    for index in range(500):
        made.add(request(f"r{index}", 4, 1))
        drain(made)
    assert len(made._scheduler._deadlines._heap) <= 64


def test_sleep_is_refused_while_requests_are_open_and_wake_begins_with_an_empty_cache() -> None:
    made, runner = engine(max_batched_tokens=64, kv_events=True)
    prompt = list(range(20))
    made.add(request("a", prompt, 2))
    refused = made.control(Control(1, "sleep"))
    assert refused.id == 1
    assert "open" in (refused.error or "")
    drain(made)
    assert any(isinstance(event, BlockStored) for event in made.kv_events())
    assert "1 or 2" in (made.control(Control(2, "sleep", 3)).error or "")
    assert made.control(Control(3, "sleep", 2)).error is None
    assert (runner.asleep, made.stats.sleeping) == (2, 2)
    assert made.kv_events() == [CacheCleared()]
    assert made.control(Control(4, "sleep", 1)).error is None
    assert (runner.asleep, made.stats.sleeping) == (1, 1)
    assert made.control(Control(5, "wake")).error is None
    assert made.control(Control(6, "wake")).error is None
    assert (runner.asleep, made.stats.sleeping) == (0, 0)
    made.add(request("b", prompt, 2))
    assert drain(made)["b"][0].cached_tokens == 0
    made.control(Control(7, "sleep"))
    made.add(request("c", prompt, 2))  # wakes it
    assert tokens_of(drain(made)["c"]) == text_alone(prompt, SamplingParams(), 2)[0]
    assert made.stats.sleeping == 0


def test_an_engine_that_can_not_wake_says_so_and_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = engine(max_batched_tokens=64)
    made.control(Control(1, "sleep"))

    def fail() -> None:
        raise OSError("the file is gone")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "wake", fail)
        assert "could not be loaded again (OSError)" in (made.control(Control(2, "wake")).error or "")
        with pytest.raises(ControlRefused, match="could not be loaded again") as refused:
            made.add(request("a", 5, 3))
        assert refusal("a", refused.value).error_kind == "asleep"
        assert (made.has_work, made.stats.sleeping) == (False, 1)
        # A deeper sleep needs nothing of what can't be had.
        assert made.control(Control(3, "sleep", 2)).error is None
        assert "could not" in (made.control(Control(4, "sleep", 1)).error or "")
        assert (runner.asleep, made.stats.sleeping) == (2, 2)
    made.add(request("a", 5, 3))
    assert len(tokens_of(drain(made)["a"])) == 3


def test_an_engine_whose_weights_can_not_be_kept_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = engine(max_batched_tokens=64)

    def fail(level: int) -> None:
        raise ValueError("the file has changed")

    monkeypatch.setattr(runner, "sleep", fail)
    assert "could not be kept (ValueError)" in (made.control(Control(1, "sleep")).error or "")
    assert made.stats.sleeping == 0
    made.add(request("a", 5, 3))
    assert len(tokens_of(drain(made)["a"])) == 3


def test_a_reset_forgets_what_is_cached() -> None:
    made, _ = engine(max_batched_tokens=64)
    prompt = list(range(20))
    for name, hits in [("a", 0), ("b", 16), ("c", 0)]:
        if name == "c":
            assert made.control(Control(1, "reset_cache")).error is None
        made.add(request(name, prompt, 2))
        assert drain(made)[name][0].cached_tokens == hits


def test_sleep_waits_for_steps_and_transfers_under_way() -> None:
    made, runner = engine(overlap=True, toy={"host_blocks": 50, "transfer_polls": 9}, max_batched_tokens=64)
    made.add(request("a", 20, 30))
    for _ in range(3):
        made.step()
    made.abort(["a"])
    assert runner.unread
    assert made.control(Control(1, "sleep")).error is None
    assert not runner.unread
    assert made.stats.kv_usage == 0
    assert made.wait_s is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pooling": "mean", "max_tokens": 3}, "An embedding generates nothing: send 0"),
        ({"pooling": "mean", "max_tokens": 0, "grammar": JSON}, "send no grammar"),
        ({"max_tokens": 0}, "Ask for at least 1"),
        ({"weight": 0.0}, "weight is 0"),
        ({"weight": float("nan")}, "weight is nan"),
    ],
)
def test_requests_that_make_no_sense_are_refused(more: dict[str, Any], message: str) -> None:
    made, _ = engine()
    with pytest.raises(RequestRejected, match=message):
        made.add(request("a", 4, **more))
    assert not made.has_work


def test_the_engine_tells_what_its_runner_is() -> None:
    made, _ = engine(toy={"num_blocks": 9})
    assert (made.info.hidden_size, made.info.model_fingerprint, made.info.max_model_len) == (2, "toy", 32)


def test_a_second_of_two_ranks_is_two_seconds_of_computing() -> None:
    paid = []
    for ranks in (1, 2):
        made, _ = engine(clock=Clock(tick=0.001), ranks=ranks)
        made.add(request("a", 4, 3))
        paid.append(sum(output.compute_us for output in drain(made)["a"]))
    assert 0 < 2 * paid[0] == paid[1]
