"""``penstock serve``: one replica of the gateway in this process."""

from __future__ import annotations

import math
import signal
import sys

import click


@click.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on; 127.0.0.1 unless the settings say otherwise.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port to listen on; 8080 unless the settings say otherwise."
)
def serve(host: str | None, port: int | None) -> None:
    """Run one gateway replica.

    It needs a migrated Postgres and a Redis that persists and never evicts; any number of replicas may share them. On
    SIGTERM it takes no new requests and lets running streams end, for PENSTOCK_DRAIN_S seconds at most.
    """
    import msgspec

    from gateway.app import create_app
    from gateway.cli import collection
    from gateway.http.draining import DrainingServer
    from gateway.http.server import server_config
    from gateway.settings import load_settings
    from gateway.telemetry import configure_logging

    configure_logging()
    settings = load_settings()
    settings = msgspec.structs.replace(settings, host=host or settings.host, port=port or settings.port)
    graceful_s = math.ceil(settings.drain_s)
    app = create_app(settings)
    config = server_config(app, settings, loop="uvloop", timeout_graceful_shutdown=graceful_s)
    server = DrainingServer(config, app.state.drain, started=collection.settle)
    # uvicorn raises the signal again once it has drained; a stop that was asked for is a success, no death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    server.run()
    if not server.started:
        raise click.ClickException(f"the gateway did not start on {settings.host}:{settings.port}; the log says why")
