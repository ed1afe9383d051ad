"""What ``benchmarks/gateway.py`` measures: the gateway with all it needs, the bare pass-through, and peers.

Peers live in environments of their own: ``make bench-peers`` installs them, in pinned versions, below .penstock/peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gateway_load import Ask

from gateway.local.services import EmbeddedPostgres, EmbeddedRedis, free_port

HERE: Final = Path(__file__).parent
PEERS: Final = HERE.parent / ".penstock" / "peers"
LOAD_CORE: Final = 0
TARGET_CORE: Final = 1
PACED: Final = "paced-50-200"
"""Model of 50 events, 5 a second."""
START_LIMIT_S: Final = 120.0

_FLEET: Final = """
pools = ["mock"]

[[backends]]
name = "mock"
pool = "mock"
brand = "generic"
base_url = "{url}"
context_length = 8192
{routes}
"""
_TENANT: Final = """
[[tenants]]
name = "{name}"
{policies}
limits = [
    {{ metric = "requests", window = "minute", amount = 100000000 }},
    {{ metric = "tokens", window = "minute", amount = 100000000000 }},
    {{ metric = "concurrent", amount = 100000 }},
    {{ metric = "budget", window = "month", amount_usd = "1000000" }},
]
"""
_LOG: Final = 'prompt_log = { level = "redacted" }'
_CACHE: Final = 'answer_cache = { mode = "exact", sampled = true }'
_TENANTS: Final = {
    "penstock": ("", ()),
    "penstock+log": (_LOG, ()),
    # Each answer is kept, and none is answered by what was kept.
    "penstock+keep": (f"{_LOG}\n{_CACHE}", (("x-penstock-cache", "refresh"),)),
    "penstock+hits": (f"{_LOG}\n{_CACHE}", ()),
}
"""By what they are called in the table: what the tenant wants of prompt log and answer cache, and headers."""
_ROUTE: Final = """
[[routes]]
name = "{name}"
pool = "mock"
context_length = 8192
timeout_s = 600

[[prices]]
route = "{name}"
input_usd_per_mtok = "0.15"
output_usd_per_mtok = "0.6"
"""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    ask: Ask
    process: subprocess.Popen[bytes] | None = None
    """None: it is not measured itself."""

    def asking(self, model: str, *, stream: bool) -> Ask:
        return replace(self.ask, model=model, stream=stream)


class NotInstalled(Exception):
    """The peer is not there."""


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    *,
    core: int,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process on one core, ended with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *map(str, command)],
            cwd=cwd,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def mock(folder: Path) -> Iterator[int]:
    """Port of the mock backend."""
    port = free_port()
    with running([sys.executable, HERE / "gateway_upstream.py", str(port)], core=LOAD_CORE, log=folder / "mock.log"):
        await_answer(Ask(port, "m"), folder / "mock.log")
        yield port


@contextlib.contextmanager
def passthrough(folder: Path, backend: int) -> Iterator[list[Target]]:
    port, log = free_port(), folder / "passthrough.log"
    command = [sys.executable, HERE / "gateway_passthrough.py", str(port), f"http://127.0.0.1:{backend}"]
    with running(command, core=TARGET_CORE, log=log) as process:
        ask = Ask(port, "m")
        await_answer(ask, log)
        yield [Target("passthrough", ask, process)]


@contextlib.contextmanager
def penstock(folder: Path, backend: int) -> Iterator[list[Target]]:
    """One gateway process: keys, limits, a budget, prices and the ledger in a real Postgres and a real Redis; without
    prompt log and answer cache, and with them."""
    postgres, redis = EmbeddedPostgres(folder / "postgres"), EmbeddedRedis(folder / "redis")
    port, log = free_port(), folder / "penstock.log"
    with contextlib.ExitStack() as stack:
        stack.callback(postgres.stop)
        stack.callback(redis.stop)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
            "DATABASE_URL": postgres.start(),
            "REDIS_URL": redis.start(),
            "PENSTOCK_SECRET_KEY": secrets.token_hex(32),
            "PENSTOCK_PORT": str(port),
        }

        def command(*arguments: str | Path) -> str:
            made = subprocess.run([penstock_program, *arguments], cwd=folder, env=env, capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(f"penstock {arguments[0]}: {made.stderr or made.stdout}")
            return made.stdout

        penstock_program = Path(sys.executable).with_name("penstock")
        command("migrate")
        routes = "".join(_ROUTE.format(name=name) for name in ("m", PACED, "endless"))
        fleet = folder / "fleet.toml"
        tenants = {name: name.replace("+", "-") for name in _TENANTS}
        fleet.write_text(
            _FLEET.format(url=f"http://127.0.0.1:{backend}/v1", routes=routes)
            + "".join(_TENANT.format(name=tenants[name], policies=policies) for name, (policies, _) in _TENANTS.items())
        )
        command("apply", "--file", fleet, "--yes")
        keys = {name: command("key", "create", "--tenant", tenant).split()[-1] for name, tenant in tenants.items()}
        process = stack.enter_context(
            running([penstock_program, "serve"], core=TARGET_CORE, log=log, cwd=folder, env=env)
        )
        targets = [
            Target(name, Ask(port, "m", keys[name], headers=headers), process)
            for name, (_, headers) in _TENANTS.items()
        ]
        for target in targets:
            await_answer(target.ask, log)
        yield targets


@contextlib.contextmanager
def portkey(folder: Path, backend: int) -> Iterator[list[Target]]:
    """Raises NotInstalled."""
    program = PEERS / "portkey" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    if not program.exists():
        raise NotInstalled
    port, log = free_port(), folder / "portkey.log"
    headers = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", f"http://127.0.0.1:{backend}/v1"))
    env = dict(os.environ) | {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}
    command = ["node", program, f"--port={port}", "--headless"]
    with running(command, core=TARGET_CORE, log=log, cwd=program.parent, env=env) as process:
        ask = Ask(port, "m", "sk-of-no-use", headers=headers)
        await_answer(ask, log)
        yield [Target("portkey", ask, process)]


@contextlib.contextmanager
def litellm(folder: Path, backend: int) -> Iterator[list[Target]]:
    """With a master key and no database. Raises NotInstalled."""
    program = PEERS / "litellm" / "bin" / "litellm"
    if not program.exists():
        raise NotInstalled
    port, log, key = free_port(), folder / "litellm.log", f"sk-{secrets.token_hex(16)}"
    upstream = {"model": "openai/m", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "of-no-use"}
    models = [{"model_name": name, "litellm_params": upstream | {"model": f"openai/{name}"}} for name in ("m", PACED)]
    config = folder / "litellm.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    command = [program, "--config", config, "--port", str(port), "--host", "127.0.0.1"]
    with running(command, core=TARGET_CORE, log=log, cwd=folder) as process:
        ask = Ask(port, "m", key)
        await_answer(ask, log)
        yield [Target("litellm", ask, process)]


def await_answer(ask: Ask, log: Path) -> None:
    """Raises RuntimeError if none comes."""
    head, _, body = ask.encode().partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[2:])
    request = urllib.request.Request(f"http://127.0.0.1:{ask.port}/v1/chat/completions", body, headers)
    ends, last = time.monotonic() + START_LIMIT_S, ""
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if json.load(answer).get("choices"):
                    return
        except urllib.error.HTTPError as fault:
            last = f"{fault.code} {fault.read()[:300]!r}"
        except OSError as fault:
            last = repr(fault)
        time.sleep(0.1)
    raise RuntimeError(f"no answer from port {ask.port}: {last}; its log ends with {log.read_bytes()[-2000:]!r}")
