"""A request inside the engine: its tokens, its blocks, how far it is computed."""

from __future__ import annotations

import enum
import math

from worker.engine.fairness import Tenant
from worker.engine.kv_cache import SequenceBlocks
from worker.engine.messages import EngineRequest


class EngineError(Exception):
    """The engine could not do what was asked. The message is fit for the caller to read."""


class RequestRejected(EngineError):
    """The request could never run, whatever the load."""


class QueueTimeout(EngineError):
    """The request waited longer than it may; the same request may succeed later."""


class GrammarFailed(EngineError):
    """The request's grammar could not be compiled, or not be followed."""


class ControlRefused(EngineError):
    """The engine can't do now what was asked of it beside generating."""


class QueueFull(EngineError):
    """Too many requests are open already; the same request may succeed later."""


def check_request(request: EngineRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise RequestRejected when ``request`` could never run on an engine of these sizes."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestRejected("The prompt has no tokens. Send at least one.")
    if request.pooling is not None:
        if request.max_tokens != 0:
            raise RequestRejected(f"max_tokens is {request.max_tokens}. An embedding generates nothing: send 0.")
        if request.grammar is not None:
            raise RequestRejected("An embedding generates nothing: send no grammar.")
    elif request.max_tokens < 1:
        raise RequestRejected(f"max_tokens is {request.max_tokens}. Ask for at least 1 token.")
    if len(prompt) + request.max_tokens > max_model_len:
        raise RequestRejected(
            f"The prompt has {len(prompt)} tokens and max_tokens is {request.max_tokens}, together "
            f"{len(prompt) + request.max_tokens}; this engine holds at most {max_model_len}. "
            "Shorten the prompt or lower max_tokens."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestRejected(f"A prompt token id lies outside the vocabulary, 0 to {vocab_size - 1}.")
    if not 0 < request.weight < math.inf:
        raise RequestRejected(f"weight is {request.weight}. Send a number above 0.")


class Status(enum.Enum):
    HELD = enum.auto()
    """Its grammar is being compiled."""
    WAITING = enum.auto()
    """Holds no blocks: not yet admitted, or preempted."""
    WAITING_FOR_KV = enum.auto()
    """Holds blocks, some of which are on their way from another tier."""
    LOADED = enum.auto()
    """Holds blocks with what came from another tier; in no step yet."""
    RUNNING = enum.auto()
    """Holds blocks for every token it knows; the runner knows it."""
    FINISHED = enum.auto()
    """Nobody will hear of it again."""


class Request:
    """The scheduler's record of one request.

    ``num_scheduled`` chases ``num_tokens``: prefill, a chunk of it, decode and recompute after preemption are all
    "compute some of the tokens between the two". Both run ahead of what is known where steps overlap; ``token_ids``
    follows as the steps retire.
    """

    __slots__ = (
        "ahead_limit",
        "arrival",
        "arrived_at",
        "blocked",
        "blocks",
        "cached_tokens",
        "displaced",
        "has_grammar",
        "host_tokens",
        "key",
        "last_step",
        "limit",
        "next_change",
        "num_charged",
        "num_paid",
        "num_prompt",
        "num_scheduled",
        "num_slots",
        "num_tokens",
        "pooling",
        "priority",
        "queued_us",
        "reads_cache",
        "request_id",
        "salt",
        "sampling",
        "special",
        "status",
        "stop_token_ids",
        "tenant",
        "token_ids",
        "told_first",
    )

    def __init__(
        self, request: EngineRequest, tenant: Tenant, blocks: SequenceBlocks, arrival: int, arrived_at: float
    ) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.priority = request.priority
        self.pooling = request.pooling
        self.salt = request.salt
        self.tenant = tenant
        self.has_grammar = request.grammar is not None
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.limit = self.num_prompt + request.max_tokens
        """Tokens that it has when it ends by length."""
        self.ahead_limit = 0 if self.has_grammar or self.pooling else self.limit - 1
        """Up to so many computed tokens, the next step may be planned before the draw of this one is read. The last
        draw has no step after it, and a grammar must see each token first."""
        self.reads_cache = request.sampling.prompt_logprobs is None and request.pooling != "mean"
        """Whether what is in the prefix cache need not be computed."""
        self.token_ids = list(request.prompt_token_ids)
        """Prompt, then what was generated."""
        self.arrival = arrival
        """Position in the order of arrival, over all classes."""
        self.arrived_at = arrived_at
        """Seconds on the scheduler's clock."""
        self.status = Status.HELD
        self.key = -1
        """Names the sequence to the runner; a new one at each admission, -1 while it holds no blocks."""
        self.blocks = blocks
        """What it holds of the KV cache, names of its blocks included."""
        self.num_slots = 0
        """Tokens for which it has blocks."""
        self.next_change = 0
        """With so many tokens computed, the KV cache has something to do for it."""
        self.num_tokens = self.num_prompt
        """Tokens known or being drawn, as far as the next step may build upon them."""
        self.num_scheduled = 0
        """Tokens whose KV is written, or will be when the steps in flight have retired."""
        self.num_paid = 0
        """Most tokens that ever were computed by retired steps: computing one of them again is overhead."""
        self.num_charged = 0
        """Tokens of the prompt that its tenant's counter was charged for."""
        self.last_step = 0
        """The last step that it was in."""
        self.blocked: tuple[int, int, int] | None = None
        """When it could last not be admitted (``worker.engine.admission``)."""
        self.displaced = 0
        """How often another tenant took its place."""
        self.queued_us: int | None = None
        """From arrival to the first step; None until then."""
        self.cached_tokens = 0
        """Tokens of the prompt that were in the cache when it was first admitted."""
        self.host_tokens = 0
        """How many of them came from the host tier."""
        self.told_first = False
        self.special = True
        """Whether an output of it says more than its token."""

    @property
    def num_left(self) -> int:
        """Tokens to compute; of one that waits, all that it has: what the cache holds of them shows at admission."""
        return self.num_tokens - (0 if self.status is Status.WAITING else self.num_scheduled)

    @property
    def order(self) -> tuple[int, float, tuple[bool, int], int]:
        """Who goes first: class, then least served tenant, then arrival."""
        tenant = self.tenant
        return (self.priority, tenant.served, tenant.rank, self.arrival)
