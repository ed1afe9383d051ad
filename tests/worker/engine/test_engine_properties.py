"""Random loads through engine, scheduler, cache and toy runner: what holds whatever comes and goes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.asking import Clock, engine, request, tokens_of
from tests.worker.engine.toy_runner import EOS, embedding_of, logprobs_of, text_alone
from worker.engine.messages import EngineOutput, EngineRequest
from worker.engine.plan import SamplingParams

Load = dict[str, Any]


@st.composite
def groups(draw: st.DrawFn, block_size: int) -> list[tuple[int | None, int]]:
    windowed = st.tuples(st.integers(1, 12), st.integers(0, 1).map(lambda sinks: sinks * block_size))
    return draw(
        st.just([(None, 0)])
        | st.tuples(windowed).map(list)
        | st.tuples(st.just((None, 0)), windowed).map(list)
        | st.tuples(windowed, windowed).map(list)
    )


@st.composite
def asks(draw: st.DrawFn, name: str, longest: int) -> Load:
    pooling = draw(st.sampled_from([None, None, None, None, "mean", "last"]))
    prompt = draw(st.integers(1, min(longest - 1, 40)))
    # Prompts begin alike, so that they find each other's blocks.
    shared = draw(st.sampled_from([0, prompt // 2, prompt - 1, prompt]))
    seed = draw(st.integers(0, 3))
    output = 0 if pooling else draw(st.integers(1, min(longest - prompt, 30)))
    sampling = SamplingParams(
        seed=seed,
        logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    asked = request(
        name,
        [5 + i for i in range(shared)] + [(31 * i + seed) % 1000 for i in range(prompt - shared)],
        output,
        sampling=sampling,
        stop=draw(st.lists(st.integers(0, 999), max_size=30)) + ([EOS] if draw(st.booleans()) else []),
        priority=draw(st.integers(-1, 1)),
        salt=draw(st.sampled_from(["", "", "", "one"])),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        pooling=pooling,
        queue_timeout_s=draw(st.sampled_from([None, None, None, 8.0])),
        deadline_s=draw(st.sampled_from([None, None, None, 20.0])),
    )
    return {
        "request": asked,
        "arrives": draw(st.integers(0, 60)),
        "leaves": draw(st.none() | st.none() | st.integers(0, 60)),
    }


@st.composite
def loads(draw: st.DrawFn) -> Load:
    block_size = draw(st.sampled_from([1, 2, 2, 4, 16]))
    max_running = draw(st.integers(1, 6))
    capacity = draw(st.integers(2, 24))
    cache_groups = draw(groups(block_size))
    longest = max(2, capacity // len(cache_groups) * block_size)
    max_batched_tokens = draw(st.integers(max_running, max_running + 40))
    return {
        "max_running": max_running,
        "max_batched_tokens": max_batched_tokens,
        "max_prefill_per_request": draw(st.none() | st.integers(1, max_batched_tokens)),
        "overlap": draw(st.booleans()),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "fair": draw(st.booleans()),
        "kv_events": draw(st.booleans()),
        "toy": {
            "num_blocks": capacity + 1,
            "block_size": block_size,
            "groups": cache_groups,
            "host_blocks": draw(st.sampled_from([0, 3, 40, 40])),
            "transfer_polls": draw(st.integers(1, 4)),
            "fail_every": draw(st.sampled_from([0, 0, 0, 3])),
        },
        "asks": [draw(asks(f"r{index}", longest)) for index in range(draw(st.integers(1, 12)))],
    }


@settings(max_examples=250, deadline=None)
@given(loads())
def test_whatever_comes_and_goes_every_request_gets_what_it_would_get_alone(load: Load) -> None:
    load = dict(load)
    asked = load.pop("asks")
    clock = Clock(tick=0.0007)
    made, runner = engine(clock=clock, **load)
    asked = [one for one in asked if _fits(one["request"], made.info.max_model_len)]
    got: dict[str, list[EngineOutput]] = defaultdict(list)
    ended: set[str] = set()
    last_arrival = max((one["arrives"] for one in asked), default=0)
    step = 0
    while made.has_work or step <= last_arrival:
        clock.now += 0.5
        for one in asked:
            if one["arrives"] == step:
                made.add(one["request"])
        gone = [
            one["request"].request_id
            for one in asked
            if one["leaves"] is not None and one["arrives"] + one["leaves"] == step
        ]
        for output in made.abort(gone) + made.step():
            assert output.request_id not in ended, "an output after the last one"
            got[output.request_id].append(output)
            if output.finish_reason is not None:
                ended.add(output.request_id)
        step += 1
        assert step < 5000, "the engine makes no progress"
    for one in asked:
        _check(one, got[one["request"].request_id])
    _check_accounts(made.stats, got)
    for _ in range(100):  # transfers that nobody waits for
        made.step()
    assert made._kv.num_free == made._kv.capacity, "a block leaked"
    assert set(runner.sequences) == set(made._scheduler._roster.retired_keys), "the runner was not told of an end"
    assert made._scheduler._roster.tenants._classes == {}


def _fits(asked: EngineRequest, longest: int) -> bool:
    return len(asked.prompt_token_ids) + asked.max_tokens <= longest


def _check(one: Load, outputs: list[EngineOutput]) -> None:
    asked: EngineRequest = one["request"]
    last = outputs[-1]
    assert last.finish_reason is not None
    tokens, reason = text_alone(asked.prompt_token_ids, asked.sampling, asked.max_tokens, asked.stop_token_ids)
    got = tokens_of(outputs)
    match last.finish_reason:
        case "abort":
            assert one["leaves"] is not None
        case "error":
            assert last.error_kind == "queue_timeout"
            assert asked.queue_timeout_s is not None
            assert len(outputs) == 1
        case _ if asked.pooling is not None:
            expected = embedding_of(asked.prompt_token_ids, asked.pooling)
            assert asked.deadline_s is not None or (last.embedding, last.finish_reason) == (expected, "stop")
            assert last.embedding in (expected, None)
        case _ if asked.deadline_s is None:
            assert (got, last.finish_reason) == (tokens, reason)
    assert got == tokens[: len(got)]
    stopped = last.finish_reason == "stop" and asked.pooling is None
    assert last.stop_token_id == (got[-1] if stopped else None)
    prefilled = [output.prefilled for output in outputs if output.prefilled is not None]
    assert prefilled == sorted(set(prefilled)), "the prompt's progress falls"
    ran = [output for output in outputs if output.token_ids or output.prefilled is not None]
    assert [output.queued_us is not None for output in ran] == [index == 0 for index in range(len(ran))]
    if ran:
        assert ran[0].cached_tokens is not None
        assert ran[0].cached_tokens < len(asked.prompt_token_ids)
        assert not ran[0].cached_tokens or asked.sampling.prompt_logprobs is None
    first = len(asked.prompt_token_ids)
    top = asked.sampling.logprobs
    told = [entry for output in outputs for entry in output.logprobs or []]
    assert told == ([] if top is None else [logprobs_of(token, first + i, top) for i, token in enumerate(got)])
    top = asked.sampling.prompt_logprobs
    told = [entry for output in outputs for entry in output.prompt_logprobs or []]
    wanted = [] if top is None else [logprobs_of(t, p, top) for p, t in enumerate(asked.prompt_token_ids)][1:]
    assert told == wanted[: len(told)]
    assert not got or told == wanted


def _check_accounts(stats: Any, got: dict[str, list[EngineOutput]]) -> None:
    paid = sum(output.compute_us for outputs in got.values() for output in outputs)
    assert all(output.compute_us >= 0 for outputs in got.values() for output in outputs)
    assert paid + stats.overhead_us == stats.step_us
    assert stats.step_us >= 700 * stats.steps
    assert stats.cache_hits <= stats.cache_queries
    assert 0 <= stats.host_hits <= stats.cache_hits
    assert (stats.running, stats.waiting, stats.waiting_for_kv, stats.kv_usage) == (0, 0, 0, stats.kv_usage)
