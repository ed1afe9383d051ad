"""A Redis Cluster of three masters on loopback, for the tests. Each node is an embedded Redis like any other."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import redis

from gateway.local.services import EmbeddedRedis
from tests.ports import free_port

PASSWORD = "cluster-password"
_SLOTS = 16384
_FORM_LIMIT_S = 60.0


class ClusterNode(EmbeddedRedis):
    """One node. It counts as dead after a second of silence; the others go on serving their slots."""

    def __init__(self, data_dir: Path, *, durable: bool = False) -> None:
        super().__init__(data_dir, PASSWORD, durable=durable)
        self._bus_port: int | None = None

    @property
    def bus_port(self) -> int:
        if self._bus_port is None:
            self._bus_port = free_port()
        return self._bus_port

    @property
    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID"))

    def _settings(self) -> dict[str, str]:
        settings = super()._settings() | {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": "1000",
            "cluster-require-full-coverage": "no",
            "cluster-port": str(self.bus_port),
            "masterauth": f'"{PASSWORD}"',
        }
        del settings["loadmodule"]
        return settings

    def ask(self, *command: str | int) -> Any:
        """One command to this node and no other."""
        with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=10, decode_responses=True)) as client:
            return client.execute_command(*command)


class RedisCluster:
    """Three masters with a third of the slots each."""

    def __init__(self, data_dir: Path, *, durable: bool = False) -> None:
        self.nodes = [ClusterNode(data_dir / f"node{number}", durable=durable) for number in range(3)]

    @property
    def url(self) -> str:
        return f"redis+cluster://:{PASSWORD}@" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> str:
        """Start the nodes, make them a cluster, and return its URL."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node._await_ready(_process(node))
        bounds = [round(_SLOTS * share / len(self.nodes)) for share in range(len(self.nodes) + 1)]
        first = self.nodes[0]
        for node, begin, end in zip(self.nodes, bounds, bounds[1:], strict=False):
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            if node is not first:
                first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        deadline = time.monotonic() + _FORM_LIMIT_S
        while not all(self._is_formed(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster did not form; see {first.log}")
            time.sleep(0.05)
        return self.url

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def owner(self, slot: int) -> ClusterNode:
        """The master that has ``slot``, as the first living node says."""
        living = next(node for node in self.nodes if node.running())
        for begin, end, master, *_ in living.ask("CLUSTER", "SLOTS"):
            if begin <= slot <= end:
                return next(node for node in self.nodes if node.port == master[1])
        raise LookupError(slot)

    def assign(self, slot: int, owner: ClusterNode) -> None:
        """Say on all living nodes that ``owner`` has ``slot``; its keys are not moved."""
        # Else a word of the earlier owner's that is still on its way could take the slot from it again.
        owner.ask("CLUSTER", "BUMPEPOCH")
        for node in sorted(self.nodes, key=lambda node: node is not owner):
            if node.running():
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", owner.id)

    def _is_formed(self, node: ClusterNode) -> bool:
        info = node.ask("CLUSTER", "INFO")
        facts = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.split("\r\n") if line)
        return (
            facts["cluster_state"] == "ok"
            and int(facts["cluster_slots_ok"]) == _SLOTS
            and int(facts["cluster_known_nodes"]) == len(self.nodes)
            and len(node.ask("CLUSTER", "SLOTS")) == len(self.nodes)
        )


def _process(node: ClusterNode) -> Any:
    assert node.process is not None
    return node.process
