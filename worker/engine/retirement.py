"""What a step gave: tokens to their requests, its time to whom it belongs, blocks to the cache, ends to who ended."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.compute_cost import CostModel, split
from worker.engine.messages import EngineOutput, FinishReason
from worker.engine.plan import Span, StepResult, TokenLogprobs
from worker.engine.request import GrammarFailed, Request, Status
from worker.engine.roster import Roster

Accept = Callable[[str, int], bool]
"""Takes a request's id and its drawn token; whether the grammar is complete. Raises GrammarFailed."""


class Retirement:
    """Applies results, step by step, and keeps the accounts of computing time."""

    def __init__(self, roster: Roster, costs: CostModel) -> None:
        self.step_us = 0
        """Time of all steps."""
        self.overhead_us = 0
        """Its part that is no request's."""
        self.computed_tokens = 0
        self._roster = roster
        self._costs = costs

    def retire(self, result: StepResult, elapsed_us: int, accept: Accept | None) -> list[EngineOutput]:
        """Retire the oldest step in flight; what each of its requests gained. A chunk of a prompt that draws nothing
        is an output too."""
        roster = self._roster
        step = roster.retire()
        computed = roster.kv.computed
        shares = split(elapsed_us, step.units)
        paid = 0
        some_finished = False
        outputs: list[EngineOutput] = []
        drawn = iter(result.tokens)
        for span, request, share in zip(step.plan.spans, step.requests, shares, strict=True):
            token = next(drawn) if span.sample else None
            end = span.start + span.count
            if request.key == span.key:
                if end >= request.next_change:
                    computed(request.blocks, request.token_ids, end)
                    request.next_change = request.blocks.next_change
            elif request.status is Status.FINISHED:
                continue
            if request.special or token is None or span.count > 1:
                output, cost = self._outcome(span, request, token, share, result, accept)
                if output is None:
                    continue
                paid += cost
            else:
                # A plain decode, as nearly all are.
                request.token_ids.append(token)
                request.num_paid = end
                paid += share
                if token in request.stop_token_ids:
                    output = EngineOutput(request.request_id, [token], "stop", stop_token_id=token, compute_us=share)
                elif end + 1 >= request.limit:
                    output = EngineOutput(request.request_id, [token], "length", compute_us=share)
                else:
                    outputs.append(EngineOutput(request.request_id, [token], compute_us=share))
                    continue
            outputs.append(output)
            if output.finish_reason is not None:
                roster.finish(request)
                some_finished = True
        if some_finished:
            roster.sweep()
        if step.departed:
            roster.release_departed(step)
        self.step_us += elapsed_us
        self.overhead_us += elapsed_us - paid
        self.computed_tokens += step.num_tokens
        return outputs

    def _outcome(
        self,
        span: Span,
        request: Request,
        token: int | None,
        share: int,
        result: StepResult,
        accept: Accept | None,
    ) -> tuple[EngineOutput | None, int]:
        """What one span gave its request, and how much of its share of the step's time the request pays."""
        end = span.start + span.count
        before = request.num_paid
        request.num_paid = max(before, end)
        prefilled = min(end, request.num_prompt)
        embedding = result.embeddings.get(span.key)
        if token is None and embedding is None and prefilled <= before:
            return None, 0  # computed anew: nothing that anyone waits for
        cost = share
        if before > span.start:
            cost = share * self._costs.units(min(before, end), end) // self._costs.units(span.start, end)
        finish_reason: FinishReason | None = None if embedding is None else "stop"
        error = None
        tokens = []
        if token is not None:
            try:
                finish_reason = self._take(request, token, accept)
                tokens = [token]
            except GrammarFailed as failure:
                finish_reason, error = "error", str(failure)
        logprobs = result.logprobs.get(span.key) if tokens else None
        output = EngineOutput(
            request.request_id,
            tokens,
            finish_reason,
            error,
            prefilled=prefilled if token is None else None,
            error_kind=None if error is None else "grammar",
            stop_token_id=token if finish_reason == "stop" and token in request.stop_token_ids else None,
            cached_tokens=None if request.told_first else request.cached_tokens,
            queued_us=None if request.told_first else request.queued_us,
            compute_us=cost,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=_unreported(span, request, before, result),
            embedding=embedding,
        )
        request.told_first = True
        sampling = request.sampling
        request.special = request.has_grammar or sampling.logprobs is not None or sampling.prompt_logprobs is not None
        return output, cost

    def _take(self, request: Request, token: int, accept: Accept | None) -> FinishReason | None:
        """Append a drawn token; why the request ends with it, if it does."""
        complete = False
        if request.has_grammar:
            # A stop token, too: where nothing may follow, the sampler ends the sequence though its text is not whole.
            if accept is None:
                raise RuntimeError(f"nobody follows the grammar of request {request.request_id!r}")
            complete = accept(request.request_id, token)
        request.token_ids.append(token)
        known = len(request.token_ids)
        if request.num_tokens < known:
            request.num_tokens = known
        if complete or token in request.stop_token_ids:
            return "stop"
        return "length" if known >= request.limit else None


def _unreported(span: Span, request: Request, before: int, result: StepResult) -> list[TokenLogprobs] | None:
    """A chunk's log-probabilities of the prompt, without those that were told before preemption."""
    told = result.prompt_logprobs.get(span.key)
    if told is None:
        return None
    # The first is of token span.start + 1; with ``before`` tokens computed, token ``before`` was told.
    return told[max(0, before - span.start) :]
