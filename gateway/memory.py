"""What the gateway remembers of requests for tenants that want it: kept answers and the prompt log, as the pipeline has
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, get_args

import msgspec

from gateway.admission.ticket import Ticket
from gateway.ask import Ask, Call
from gateway.cache.found import Hit, Miss
from gateway.cache.question import Question
from gateway.cache.service import AnswerCache
from gateway.long_work import worked
from gateway.order import Plan
from gateway.policies.answer_cache import NO_CACHE, NO_POLICY, CacheRules, RequestMode, rules_for
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.promptlog.log import PromptLog
from gateway.recording import Recording
from gateway.routing.route import Endpoint, Route
from gateway.tenants.principal import Principal
from worker.protocol.errors import bad_request

CACHE_HEADER: Final = "x-penstock-cache"
TTL_HEADER: Final = "x-penstock-cache-ttl"
LOG_HEADER: Final = "x-penstock-log"
_MODES: Final = get_args(RequestMode)
MAX_TTL_S: Final = 30 * 24 * 3600
_MADE_BY: Final = "\0made by"
"""Names of fields that no client's JSON can set: they are set over what it says."""
_CAP: Final = "\0output cap"
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Memory:
    """``cache``, ``log``: None where there is no Redis for them. ``endpoints``: of a pool."""

    def __init__(
        self, cache: AnswerCache | None, log: PromptLog | None, endpoints: Callable[[str], Sequence[Endpoint]]
    ) -> None:
        self._cache = cache
        self._log = log
        self._endpoints = endpoints
        self._made_by: dict[str, str] = {}
        """By route, who served it when somebody did."""

    def rules(self, call: Call, principal: Principal, route: Route) -> CacheRules:
        """What holds for a request. Raises ApiError (400) for a header that cannot be meant."""
        if call.cache is None and principal.answer_cache is NO_POLICY and route.answer_cache is NO_POLICY:
            return NO_CACHE
        mode, ttl_s = _mode(call.cache), _ttl(call.cache_ttl)
        if self._cache is None:
            return NO_CACHE
        return rules_for(principal.answer_cache, route.answer_cache, request=mode, request_ttl_s=ttl_s)

    async def look_up(self, ask: Ask, plan: Plan, rules: CacheRules) -> Hit | Miss | None:
        """What the cache has for an admitted request; None: it is not asked. Within some 50 ms; raises nothing."""
        if self._cache is None or rules.mode == "off":
            return None
        principal, route = plan.principal, plan.route
        body = await worked(len(ask.raw), partial(_decoder.decode, ask.raw))
        body[_MADE_BY] = msgspec.Raw(msgspec.json.encode(self._who_makes(route)))
        body[_CAP] = msgspec.Raw(msgspec.json.encode(plan.order.output_cap))
        return await self._cache.look_up(
            Question(
                api=ask.api,
                route=route.name,
                version=str(route.version),
                body=body,
                tenant_id=principal.tenant_id,
                project_id=principal.project_id,
                end_user=plan.draft.end_user,
                rules=rules,
                streamed=ask.stream,
                tags=ask.tags,
                request_id=plan.order.request_id,
            )
        )

    def recording(
        self, call: Call, ask: Ask, plan: Plan, ticket: Ticket, rules: CacheRules, found: Hit | Miss | None
    ) -> Recording | None:
        """Of an admitted request; None: it leaves nothing behind."""
        policy = self._policy(call, plan.principal)
        miss = found if isinstance(found, Miss) else None
        if policy is NO_LOG and miss is None:
            return None
        log = None if policy is NO_LOG else self._log
        return Recording(ask, ticket.admitted_at, policy=policy, log=log, miss=miss, most_kept=rules.max_answer_bytes)

    def replay(self, call: Call, ask: Ask, ticket: Ticket) -> Recording | None:
        """As ``recording``, of a request that another one's answer is replayed for."""
        policy = self._policy(call, ticket.principal)
        if policy is NO_LOG:
            return None
        return Recording(ask, ticket.admitted_at, policy=policy, log=self._log, miss=None, most_kept=0)

    def _policy(self, call: Call, principal: Principal) -> PromptLogPolicy:
        policy = principal.prompt_log
        if self._log is None or policy.level == "off" or (policy.opt_out and call.log == "off"):
            return NO_LOG
        return policy

    def _who_makes(self, route: Route) -> str:
        """Changes when other weights or other servers answer for the route; while none is up, the last that were."""
        makers = {
            endpoint.fingerprint or f"{endpoint.base_url} {endpoint.sends_model or target.backend_model}"
            for target in route.targets
            for endpoint in self._endpoints(target.pool)
        }
        if makers:
            self._made_by[route.name] = "\n".join(sorted(makers))
        return self._made_by.get(route.name, "")


def _mode(text: str | None) -> RequestMode | None:
    if text is None or text in _MODES:
        return text  # type: ignore[return-value]
    raise bad_request(f"The header '{CACHE_HEADER}' must be one of {', '.join(_MODES)}.")


def _ttl(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_TTL_S):
        raise bad_request(f"The header '{TTL_HEADER}' must be a number of seconds from 1 to {MAX_TTL_S}.")
    return int(text)
