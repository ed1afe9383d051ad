"""Command line options that say how the engine runs, and the EngineConfig that they make."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from worker.engine.config import EngineConfig

Command = TypeVar("Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(?P<number>\d{1,20}(?:\.\d{1,20})?)\s*(?P<unit>[KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_LARGEST_SIZE = 2**50


class Size(click.ParamType[int]):
    """Bytes, written as ``512MiB``, ``2GB`` or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value  # a default
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write it as 512MiB, 2GB or a number of bytes.", param, ctx)
        size = int(Fraction(match["number"]) * _UNITS[(match["unit"] or "").upper()])
        if not 1 <= size <= _LARGEST_SIZE:
            self.fail(f"{value!r} is not between 1 byte and {_LARGEST_SIZE >> 40} TiB.", param, ctx)
        return size


_SECONDS = click.FloatRange(min=0, min_open=True)

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--device",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="Where the model runs; auto: on a GPU if there is one.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1),
        help="Threads of the engine on CPU.  [default: one for each core it may use]",
    ),
    click.option(
        "--block-size",
        type=click.IntRange(1),
        help="Tokens in a block of the KV cache.  [default: what suits the device]",
    ),
    click.option(
        "--kv-cache-size",
        "kv_cache_bytes",
        type=Size(),
        help="Memory for the KV cache, e.g. 512MiB.  [default: fitted to the device]",
    ),
    click.option(
        "--host-kv-size",
        "host_kv_bytes",
        type=Size(),
        default=0,
        help="Host memory that keeps copies of cached blocks, from where they come back when the KV cache had to let "
        "them go.  [default: none]",
    ),
    click.option(
        "--prefix-caching/--no-prefix-caching",
        default=True,
        show_default=True,
        help="Compute what prompts of one tenant have in common only once.",
    ),
    click.option(
        "--kv-events/--no-kv-events",
        default=False,
        show_default=True,
        help="Tell at /kv/events which blocks the prefix cache holds.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(2),
        help="Most tokens of prompt and answer together.  [default: what the model was trained for]",
    ),
    click.option(
        "--max-batched-tokens",
        default=512,
        show_default=True,
        type=click.IntRange(1),
        help="Token budget of one engine step: longer prompts are computed in chunks.",
    ),
    click.option(
        "--max-prefill-per-request",
        type=click.IntRange(1),
        help="Most prompt tokens of one request in a step.  "
        "[default: the whole budget, of which shorter prompts of its tenant may have up to half first]",
    ),
    click.option(
        "--max-running", default=64, show_default=True, type=click.IntRange(1), help="Most requests in one engine step."
    ),
    click.option(
        "--max-waiting",
        default=1024,
        show_default=True,
        type=click.IntRange(0),
        help="Most requests that wait for a place; further ones are refused with 503.",
    ),
    click.option(
        "--queue-timeout",
        "queue_timeout_s",
        type=_SECONDS,
        metavar="SECONDS",
        help="How long a request may wait for its first step before it is refused with 503.  [default: no limit]",
    ),
    click.option(
        "--request-timeout",
        "deadline_s",
        type=_SECONDS,
        metavar="SECONDS",
        help="How long a request may take, its wait included; the answer then ends as at max_tokens.  "
        "[default: no limit]",
    ),
    click.option(
        "--fair/--no-fair",
        default=True,
        show_default=True,
        help="Share the engine between tenants by weight; else first come, first served.",
    ),
    click.option(
        "--overlap/--no-overlap",
        default=False,
        show_default=True,
        help="Plan and submit a step before the tokens of the one before it are read. Gains where a GPU would wait.",
    ),
    click.option(
        "--attention-window",
        type=click.IntRange(1),
        metavar="TOKENS",
        help="Let each token see only so many before it, in layers that see all otherwise. Answers get WORSE: the "
        "model forgets what lies further back. For contexts that would not fit at all.  [default: off]",
    ),
    click.option(
        "--attention-sinks",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        metavar="TOKENS",
        help="With --attention-window: so many tokens at the beginning stay visible, without which models of full "
        "attention break down. A multiple of the block size.",
    ),
)
"""Each parsed into the field of EngineConfig of the same name; in the order of the help."""


def engine_options(command: Command) -> Command:
    """Give a click command all of these options; pass what they parsed to ``engine_config``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config(path: Path, fields: dict[str, Any]) -> EngineConfig:
    """The configuration for the model at ``path``. Raises UsageError for options that contradict each other.

    ``fields``: what the options of ``engine_options`` were parsed into.
    """
    from worker.engine.config import EngineConfig

    config = EngineConfig(model_path=str(path), **fields)
    if config.max_running > config.max_batched_tokens:
        raise click.UsageError(
            f"--max-running {config.max_running} is above --max-batched-tokens {config.max_batched_tokens}, but each "
            "running request takes at least one token of a step."
        )
    if config.attention_sinks and config.attention_window is None:
        raise click.UsageError("--attention-sinks needs --attention-window: without it all tokens are visible.")
    if not config.prefix_caching:
        for option, given in (("--host-kv-size", config.host_kv_bytes), ("--kv-events", config.kv_events)):
            if given:
                raise click.UsageError(
                    f"{option} is about the prefix cache, which --no-prefix-caching turns off. Leave one of them out."
                )
    return config
