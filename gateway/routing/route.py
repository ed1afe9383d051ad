"""A route: the public name of a model, and how requests for it are bounded and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UnpricedPolicy = Literal["refuse", "serve"]
DEFAULT_OUTPUT_TOKENS = 512
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    """What tenants put in ``model``."""
    pool: str
    """Name of the declared pool of backends that serve it."""
    backend_model: str
    """What is sent to the backend as ``model``."""
    context_length: int
    """Most tokens that prompt and output may have together."""
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
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One live backend of a pool."""

    id: str
    pool: str
    base_url: str
    model: str
    context_length: int
    """Most tokens that it takes, prompt and output together."""
    fingerprint: str = ""
    """Of the model that it serves; empty: it does not tell."""
