from __future__ import annotations

import pytest
import uvicorn

from tests.gateway.cli.conftest import Penstock


def test_idle_connections_outlive_those_of_a_proxy(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    """nginx keeps a connection for 60 s, and would write a request into one that the gateway is just closing."""
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: configs.append(server.config))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gateway.telemetry.configure_logging", lambda: None)
    penstock("serve")
    (config,) = configs
    assert config.timeout_keep_alive > 60
