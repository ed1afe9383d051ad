"""A request inside the engine: its tokens, its blocks, how far it is computed."""

from __future__ import annotations

import enum

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
    if request.max_tokens < 1:
        raise RequestRejected(f"max_tokens is {request.max_tokens}. Ask for at least 1 token.")
    if len(prompt) + request.max_tokens > max_model_len:
        raise RequestRejected(
            f"The prompt has {len(prompt)} tokens and max_tokens is {request.max_tokens}, together "
            f"{len(prompt) + request.max_tokens}; this engine holds at most {max_model_len}. "
            "Shorten the prompt or lower max_tokens."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestRejected(f"A prompt token id lies outside the vocabulary, 0 to {vocab_size - 1}.")


class Status(enum.Enum):
    WAITING = enum.auto()
    """Holds no blocks: not yet admitted, or preempted."""
    RUNNING = enum.auto()
    """Holds blocks for every token it knows."""
    FINISHED = enum.auto()
    """Holds nothing; nobody will hear of it again."""


class Request:
    """The scheduler's record of one request.

    ``num_computed`` chases ``len(token_ids)``: prefill, a chunk of it, decode and recompute after preemption are
    all "compute some of the tokens between the two".
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "key",
        "max_tokens",
        "num_computed",
        "num_prefilled",
        "num_prompt",
        "priority",
        "request_id",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, arrival: int) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.priority = request.priority
        self.max_tokens = request.max_tokens
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        """Prompt, then what was generated."""
        self.arrival = arrival
        """Position in the order of arrival, over all classes."""
        self.status = Status.WAITING
        self.key = -1
        """Names the sequence to the runner; a new one at each admission, -1 while waiting."""
        self.num_computed = 0
        """Tokens whose KV is written."""
        self.num_prefilled = 0
        """Most tokens of the prompt that ever were computed: preemption does not take them back."""
        self.block_ids: list[int] = []

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: class, then arrival. The last in this order is the first to be preempted."""
        return (self.priority, self.arrival)
