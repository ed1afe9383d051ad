"""A route: the public name of a model, and how requests for it are bounded and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from gateway.apis import SERVED_BY, Api, Family
from gateway.policies.answer_cache import NO_POLICY, CachePolicy

UnpricedPolicy = Literal["refuse", "serve"]
DEFAULT_OUTPUT_TOKENS = 512
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Target:
    """A pool that serves a route, and the name it knows the model by."""

    pool: str
    backend_model: str
    weight: float = 1.0
    """Its share of the requests beside targets of the same priority; 0: only if no other is left."""
    priority: int = 0
    """Lower first; the next only where none of these can be used."""


@dataclass(frozen=True)
class Route:
    name: str
    """What tenants put in ``model``."""
    pool: str
    """Name of the declared pool of backends that serve it."""
    backend_model: str
    """What is sent to the backend as ``model``."""
    context_length: int
    """What tenants are told that prompt and output may have together. Backends refuse what is too long for them; what a
    longer one takes is reserved and charged all the same."""
    default_output_tokens: int
    max_output_tokens: int
    timeout_s: float
    """Wall-clock limit of one request, from admission to the last byte."""
    unpriced: UnpricedPolicy = "refuse"
    """While no price is in force: refuse the request, or serve it, charge nothing and mark its row so."""
    tokenizer: str | None = None
    """Which tokenizer counts prompts: an encoding's name, or ``backend`` for the one that its workers tell. None:
    prompts are bounded by their bytes."""
    version: int = 1
    """Counts changes of the route."""
    weight: float = 1.0
    """Of the first target, as in ``Target``."""
    priority: int = 0
    """Of the first target, as in ``Target``."""
    more_targets: tuple[Target, ...] = ()
    """Beside the first, which ``pool`` and ``backend_model`` name."""
    answer_cache: CachePolicy = NO_POLICY

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return (Target(self.pool, self.backend_model, self.weight, self.priority), *self.more_targets)


def new_route(
    name: str,
    *,
    pool: str,
    context_length: int,
    backend_model: str | None = None,
    default_output_tokens: int | None = None,
    max_output_tokens: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    unpriced: UnpricedPolicy = "refuse",
    tokenizer: str | None = None,
    weight: float = 1.0,
    priority: int = 0,
    more_targets: Iterable[Target] = (),
    answer_cache: CachePolicy = NO_POLICY,
) -> Route:
    """A route with the usual values for what is not given."""
    most = context_length if max_output_tokens is None else max_output_tokens
    return Route(
        name=name,
        pool=pool,
        backend_model=name if backend_model is None else backend_model,
        context_length=context_length,
        default_output_tokens=(
            min(DEFAULT_OUTPUT_TOKENS, most) if default_output_tokens is None else default_output_tokens
        ),
        max_output_tokens=most,
        timeout_s=timeout_s,
        unpriced=unpriced,
        tokenizer=tokenizer,
        weight=weight,
        priority=priority,
        more_targets=tuple(more_targets),
        answer_cache=answer_cache,
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One live backend of a pool: a worker that registered, or a backend that an administrator declared."""

    id: str
    pool: str
    base_url: str
    """Without the path of an API, and without a slash at its end."""
    model: str
    """The name that it serves the model by, as it tells itself; for a declared backend its own name."""
    context_length: int
    """Most tokens that it takes, prompt and output together."""
    fingerprint: str = ""
    """Of the model that it serves; empty: it does not tell."""
    family: Family = "penstock"
    brand: str = "penstock"
    """Whose server it is, for what that one does in its own way: a key of ``gateway.backends.brands.BRANDS``."""
    sends_model: str | None = None
    """What to put into ``model`` instead of the target's name."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request, lower-case names; they bear its secret."""
    weight: float = 1.0
    """Its share of the requests beside others of its pool and priority; 0: only if no other is left."""
    priority: int = 0
    """Lower first."""
    connect_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    """None: as the gateway's settings have it."""
    revision: int = 0
    """Of a declared backend: counts its changes."""

    @property
    def apis(self) -> frozenset[Api]:
        return SERVED_BY[self.family]
