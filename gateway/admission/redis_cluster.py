"""A Redis Cluster: one hand-pipelined connection to each master, and the map of slots that says which one to ask.

A master's death or silence hurts only the slots it has. The map is read anew when a node sends a call elsewhere, when
a connection is lost, and when none can be made, so that a replica that took over is found by the next call or so.

Specification: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
"""

from __future__ import annotations

import asyncio
import logging
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from gateway.admission.redis_server import PipelinedRedis
from gateway.admission.redis_wire import Argument, Call, RedisClient, RedisError, RedisUnavailable, Script, pack
from gateway.redis_url import Address, ClusterAddress, parse_redis_url

log = logging.getLogger(__name__)

SLOTS = 16384
_MOST_HOPS = 16
_ASK_AGAIN_S = 0.03
_REFRESH_PAUSE_S = 0.1
_GRACE_S = 0.01
_ASKING = pack(("ASKING",))

Endpoint = tuple[str, int]


@lru_cache(maxsize=4096)
def _slot_of_tag(tag: bytes) -> int:
    return crc_hqx(tag, 0) % SLOTS  # CRC-16/XMODEM, which is Redis'


def slot_of(key: Argument) -> int:
    """The slot of a key: of what stands between its first ``{`` and the next ``}``, if that is not empty."""
    text = key if isinstance(key, bytes) else str(key).encode()
    begin = text.find(b"{")
    if begin >= 0:
        end = text.find(b"}", begin + 1)
        if end > begin + 1:
            text = text[begin + 1 : end]
            return _slot_of_tag(text)
    return crc_hqx(text, 0) % SLOTS


class ClusterRedis(RedisClient):
    """Commands and scripts for a cluster. A script goes where its first key is; all its keys must share a slot."""

    def __init__(
        self,
        url: str | ClusterAddress,
        *,
        timeout_s: float,
        scripts: Sequence[Script] = (),
        on_connected: Callable[[], None] | None = None,
        name: str = "penstock",
    ) -> None:
        """``on_connected``: called when the first node is connected, and whenever one is connected again or took over:
        it may lack the last second of writes."""
        super().__init__(timeout_s)
        address = parse_redis_url(url) if isinstance(url, str) else url
        if not isinstance(address, ClusterAddress):
            raise ValueError("REDIS_URL names one server, not a cluster")
        self._seeds = address
        self._scripts = tuple(scripts)
        self._on_connected = on_connected
        self._name = name
        self._nodes: dict[Endpoint, PipelinedRedis] = {}
        self._map: list[PipelinedRedis | None] | None = None
        self._met: set[Endpoint] = set()
        """Nodes of the first map that were not connected yet: their first connection is no return."""
        self._told = False
        self._parked: list[Call] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._again = False
        self._leaving: set[asyncio.Future[None]] = set()
        self._closed = False

    async def flushed(self, key: str) -> bool:
        node = None if self._map is None else self._map[slot_of(key)]
        return node is not None and await node.flushed()

    async def close(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        self._fail_parked(RedisUnavailable("closed", unsent=True))
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    # Sending

    def _submit(self, key: Argument | None, packed: bytes, whole: Callable[[], bytes] | None) -> asyncio.Future[Any]:
        call = self._call(packed, whole)
        call.slot = None if key is None else slot_of(key)
        call.reroute = self._reroute
        self._send(call)
        return call.future

    def _send(self, call: Call) -> None:
        if self._closed:
            call.fail(RedisUnavailable("closed", unsent=True))
            return
        if self._map is None:
            self._limit(call)
            self._parked.append(call)
            self._refresh()
            return
        node = self._any_node() if call.slot is None else self._map[call.slot]
        if node is None:
            call.fail(RedisUnavailable(f"no node of the Redis cluster serves slot {call.slot}", unsent=True))
            self._refresh()
            return
        node.send(call)

    def _any_node(self) -> PipelinedRedis | None:
        nodes = self._nodes.values()
        return next((node for node in nodes if node.connected), next(iter(nodes), None))

    def _limit(self, call: Call) -> None:
        """See that a call that waits outside its place in a connection's order ends in time all the same.

        From here on it is this timer that ends it; a connection has the usual time to answer before it is given up.
        """
        loop = asyncio.get_running_loop()
        if call.hops == 0:
            fault = RedisUnavailable("the Redis cluster does not answer")
            timer = loop.call_at(call.deadline + _GRACE_S, call.fail, fault)
            call.future.add_done_callback(lambda _: timer.cancel())
        call.hops += 1
        call.deadline = loop.time() + self._timeout_s

    def _reroute(self, call: Call, text: str) -> bool:
        kind, *rest = text.split()
        if call.future.done():
            return True
        if kind == "CLUSTERDOWN":
            self._refresh()
            return False
        self._limit(call)
        if kind == "TRYAGAIN":  # its keys are on two nodes while their slot moves
            asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._send_again, call)
            return True
        if call.hops > _MOST_HOPS:
            call.fail(RedisUnavailable(f"the nodes of the Redis cluster disagree: {text}", unsent=True))
            return True
        node = self._node(self._endpoint(rest[1]))
        if kind == "MOVED":
            if self._map is not None:
                self._map[int(rest[0])] = node
            self._refresh()
        else:
            if call.whole is not None:  # NOSCRIPT would use up the leave that ASKING gives for one command
                call.packed, call.whole = call.whole(), None
            asking = Call(asyncio.get_running_loop().create_future(), call.deadline, _ASKING)
            asking.future.add_done_callback(_ignore)
            node.send(asking)
        node.send(call)
        return True

    def _send_again(self, call: Call) -> None:
        if not call.future.done():
            self._send(call)

    def _endpoint(self, text: str) -> Endpoint:
        host, _, port = text.rpartition(":")
        return host or self._seeds.seeds[0].host, int(port)

    # The map of slots

    def _node(self, endpoint: Endpoint) -> PipelinedRedis:
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = PipelinedRedis(
                self._seeds.seeds[0].at(*endpoint),
                timeout_s=self._timeout_s,
                scripts=self._scripts,
                on_connected=lambda: self._connected(endpoint),
                on_lost=self._refresh,
                name=self._name,
            )
        return node

    def _connected(self, endpoint: Endpoint) -> None:
        first = endpoint in self._met
        self._met.discard(endpoint)
        if first and self._told:
            return
        self._told = True
        if self._on_connected is not None:
            self._on_connected()

    def _refresh(self) -> None:
        """Read the map anew, soon; asked for again meanwhile, once more after it."""
        if self._closed:
            return
        if self._refreshing is None:
            loop = asyncio.get_running_loop()
            self._refreshing = loop.create_task(self._read_map(), name=f"map of {self._name}")
        else:
            self._again = True

    async def _read_map(self) -> None:
        lost = False
        try:
            while True:
                self._again = False
                ranges = await self._ask_for_map()
                if ranges:
                    lost = False
                    self._adopt(ranges)
                else:
                    if not lost:
                        log.warning("no node of the Redis cluster at %s can be asked for its map", self._seeds)
                    lost = True
                    self._fail_parked(RedisUnavailable("no node of the Redis cluster can be reached", unsent=True))
                    self._again = False
                # Several nodes may be lost at once, and a replica takes a while to take over.
                await asyncio.sleep(_REFRESH_PAUSE_S)
                if not self._again and not self._parked:
                    return
        finally:
            self._refreshing = None

    async def _ask_for_map(self) -> list[tuple[int, int, Endpoint]]:
        """The first good answer of any node: all are asked at once, since some may hang."""
        asked: dict[asyncio.Future[Any], Address] = {}
        probes: list[PipelinedRedis] = []
        known = {node.address: node for node in self._nodes.values()}
        for address in {*known, *self._seeds.seeds}:
            probe = known.get(address)
            if probe is None:
                if any(node.connected for node in known.values()):
                    continue  # a seed's other name
                probe = PipelinedRedis(address, timeout_s=self._timeout_s, name=self._name)
                probes.append(probe)
            asked[probe.issue("CLUSTER", "SLOTS")] = address
        try:
            pending = set(asked)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    try:
                        if ranges := _ranges(answer.result(), asked[answer]):
                            return ranges
                    except (RedisUnavailable, RedisError) as fault:
                        log.debug("%s does not tell the map of the cluster: %s", asked[answer], fault)
            return []
        finally:
            for answer in asked:
                answer.add_done_callback(_ignore)
            for probe in probes:
                self._leave(probe)

    def _adopt(self, ranges: Iterable[tuple[int, int, Endpoint]]) -> None:
        ranges = list(ranges)
        masters = {endpoint for _, _, endpoint in ranges}
        begun = self._map is not None
        if not begun:
            self._met |= masters
        slots: list[PipelinedRedis | None] = [None] * SLOTS
        for begin, end, endpoint in ranges:
            slots[begin : end + 1] = [self._node(endpoint)] * (end + 1 - begin)
        self._map = slots
        for endpoint in set(self._nodes) - masters:
            self._leave(self._nodes.pop(endpoint))
        if not begun:
            for endpoint in masters:
                self._node(endpoint).connect()
        parked, self._parked = self._parked, []
        for call in parked:
            if not call.future.done():
                self._send(call)

    def _leave(self, node: PipelinedRedis) -> None:
        """Close a connection that is not needed any more, once what is on its way over it has had its time."""
        task = asyncio.ensure_future(self._close_later(node))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _close_later(self, node: PipelinedRedis) -> None:
        try:
            await asyncio.sleep(self._timeout_s + _GRACE_S)
        finally:
            await node.close()

    def _fail_parked(self, fault: RedisUnavailable) -> None:
        parked, self._parked = self._parked, []
        for call in parked:
            call.fail(fault)


def _ranges(reply: Any, asked: Address) -> list[tuple[int, int, Endpoint]]:
    """``CLUSTER SLOTS``: first and last slot, and where their master is; an unnamed host is the one that was asked."""
    found = []
    for begin, end, master, *_ in reply:
        host = (master[0] or b"").decode()
        found.append((begin, end, (host if host not in ("", "?") else asked.host, master[1])))
    return found


def _ignore(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
