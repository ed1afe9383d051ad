"""compose.yaml: valid by the Compose specification's schema, safe by its words, and true: what its services name is run
here, as local processes, with the very commands and nothing but the environment that the file gives them.

Images are not built and Redis' and nginx' own health commands not run: neither Docker nor those programs need be here.
"""

from __future__ import annotations

import copy
import importlib.resources
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psycopg
import pytest
import redis
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway.local import install
from gateway.local.services import log_tail, postgres_program, redis_program, spawn
from gateway.settings import Settings, load_settings
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "compose.yaml").read_text()
SECRETS = {
    *("POSTGRES_PASSWORD", "REDIS_PASSWORD", "CACHE_REDIS_PASSWORD", "PENSTOCK_FLEET_TOKEN", "PENSTOCK_SECRET_KEY")
}
ENVIRONMENT = {name: f"{name.lower().replace('_', '')}0123456789abcdef" for name in SECRETS}
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<rule>:[-?])(?P<rest>[^}]*))?\})")


class Missing(Exception):
    pass


def interpolate(value: Any, environment: dict[str, str]) -> Any:
    """``value`` with variables put in, by the Compose specification's rules for the forms that the file uses."""

    def put(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        given = environment.get(match["name"], "")
        if given or match["rule"] is None:
            return given
        if match["rule"] == ":?":
            raise Missing(f"{match['name']}: {match['rest']}")
        return match["rest"]

    if isinstance(value, dict):
        return {key: interpolate(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, environment) for item in value]
    return VARIABLE.sub(put, value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(TEXT)
    return document


@pytest.fixture(scope="module")
def services(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = interpolate(raw, ENVIRONMENT)["services"]
    return found


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    path = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_valid_by_the_schema_of_the_specification(raw: dict[str, Any], schema: dict[str, Any]) -> None:
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.validate(raw)
    validator.validate(interpolate(raw, ENVIRONMENT))
    broken = copy.deepcopy(raw)
    broken["services"]["gateway"]["healthchek"] = broken["services"]["gateway"].pop("healthcheck")
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(broken)


def test_references_hold(raw: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    volumes = set()
    for name, service in services.items():
        for network in service["networks"]:
            assert network in raw["networks"], name
        for needed in service.get("depends_on", {}):
            assert needed in services, name
        for volume in service.get("volumes", []):
            volumes.add(volume.split(":")[0])
        for config in service.get("configs", []):
            assert (ROOT / raw["configs"][config["source"]]["file"]).is_file()
    assert volumes == set(raw["volumes"])


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_no_secret_has_a_default(raw: dict[str, Any], name: str) -> None:
    uses = [match for match in VARIABLE.finditer(TEXT) if match["name"] == name]
    assert uses
    assert all(match["rule"] == ":?" for match in uses)
    with pytest.raises(Missing, match=rf"{name}: .*openssl rand"):
        interpolate(raw, {**ENVIRONMENT, name: ""})


def test_the_example_environment_names_every_variable() -> None:
    lines = (ROOT / "deploy/env.example").read_text().splitlines()
    named = {match[1]: match[2] for line in lines if (match := re.match(r"#?([A-Z_]+)=(.*)", line))}
    used = {match["name"] for match in VARIABLE.finditer(TEXT) if match["name"]}
    assert set(named) == used
    assert all(named[secret] == "" for secret in SECRETS)


def test_the_shape(services: dict[str, dict[str, Any]]) -> None:
    assert services["gateway"]["deploy"]["replicas"] == 2
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert services["worker-cpu"]["command"] == services["worker-gpu"]["command"]
    assert services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert services["redis"]["image"] == services["cache"]["image"] == "redis:8"
    assert services["gateway"]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    assert services["migrate"]["restart"] == "no"
    for name, service in services.items():
        assert "healthcheck" in service or name == "migrate", f"{name} has no health check"


def test_nothing_is_reachable_that_need_not_be(raw: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "proxy": ["127.0.0.1:8080:8080"]
    }
    assert raw["networks"]["data"]["internal"] is True
    assert raw["networks"]["fleet"]["internal"] is True
    assert {name for name, service in services.items() if "data" in service["networks"]} == {
        *("postgres", "redis", "cache", "migrate", "gateway")
    }
    for name in ("worker-cpu", "worker-gpu"):
        assert services[name]["networks"] == ["fleet"]
        assert not {"DATABASE_URL", "REDIS_URL"} & set(services[name]["environment"])
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def stages() -> dict[str, list[str]]:
    """The instructions of each named stage of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"FROM \S+ AS (\S+)", line):
            current = found.setdefault(match[1], [])
        elif line and not line.startswith("#"):
            current.append(line)
    return found


def test_no_service_runs_as_root(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if "build" in service:
            users = [line for line in stages()[service["build"]["target"]] if line.startswith("USER ")]
            assert users[-1:] == ["USER penstock"], name
        elif name == "proxy":
            assert "unprivileged" in service["image"]
        else:
            assert service["user"] in ("postgres", "redis"), name


def test_the_images_are_built_from_what_is_here_and_sent() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, lines in stages().items():
        for line in lines:
            if line.startswith("COPY ") and "--from" not in line:
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), f"{name}: {line}"
                    assert source.split("/")[0] in sent, f"{name}: {line}"


def test_the_images_install_what_the_project_names() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert f'"{install.torch_requirement(ROOT / "pyproject.toml")}"' in text
    assert f'"{install.UV}"' in text
    assert re.findall(r"ARG MODEL_PACKAGE=(.*)", text) == [install.MODEL] * 2


def test_the_lock_satisfies_the_project() -> None:
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lock = (ROOT / "deploy/gateway.lock").read_text()
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE))
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{line} is not locked; run `make lock`"
        assert requirement.specifier.contains(locked[name]), f"{line}: run `make lock`"
    assert lock.count("--hash=sha256:") >= len(locked)


def test_the_proxy_buffers_nothing_and_hides_what_is_internal() -> None:
    text = (ROOT / "deploy/nginx.conf").read_text()
    assert "proxy_buffering off;" in text
    assert re.search(r"location /internal/ \{\s*return 404;", text)
    assert "server gateway:8080 resolve" in text
    limit = re.search(r"client_max_body_size (\d+)m;", text)
    assert limit
    assert int(limit[1]) * 1024 * 1024 > next(
        default
        for field, default in zip(
            reversed(Settings.__struct_fields__), reversed(Settings.__struct_defaults__), strict=False
        )
        if field == "max_body_bytes"
    )


# What the services name, run.


class Host:
    """Stands for the network of the file: its names and ports become this machine's."""

    def __init__(self, folder: Path, services: dict[str, dict[str, Any]], database_url: str, redis_url: str) -> None:
        self.folder = folder
        self.gateway_port, self.worker_port = free_port(), free_port()
        self._services = services
        self._names = {
            services["gateway"]["environment"]["DATABASE_URL"]: database_url,
            services["gateway"]["environment"]["REDIS_URL"]: redis_url,
            "http://gateway:8080": f"http://127.0.0.1:{self.gateway_port}",
            "127.0.0.1:8080": f"127.0.0.1:{self.gateway_port}",
            "127.0.0.1:8100": f"127.0.0.1:{self.worker_port}",
            ":8100": f":{self.worker_port}",
            "--port 8100": f"--port {self.worker_port}",
        }

    def here(self, text: str) -> str:
        for theirs, ours in self._names.items():
            text = text.replace(theirs, ours)
        return str(self.gateway_port) if text == "8080" else text

    def environment(self, name: str) -> dict[str, str]:
        """Nothing but what the file gives the service, where programs are found, and what Docker itself sets."""
        given = {key: self.here(value) for key, value in self._services[name].get("environment", {}).items()}
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        return {"PATH": path, "HOSTNAME": "127.0.0.1", **given}

    def command(self, name: str) -> list[str]:
        return [self.here(word) for word in self._services[name]["command"]]

    def run(self, name: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the service's environment, its own if none is given, to its end."""
        return subprocess.run(
            command or self.command(name),
            env=self.environment(name),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def healthy(self, name: str) -> bool:
        kind, *test = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.run(name, [self.here(word) for word in test]).returncode == 0

    @contextmanager
    def up(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """The service, running and healthy; stopped as Docker stops it, within its grace period."""
        log = self.folder / f"{name}.log"
        program, *arguments = self.command(name)
        found = [Path(folder) / program for folder in self.environment(name)["PATH"].split(os.pathsep)]
        path = next(candidate for candidate in found if candidate.exists())
        process = spawn(
            [str(path), *arguments],
            log=log,
            death_signal=signal.SIGKILL,
            environment=self.environment(name),
            working_dir=self.folder,
        )
        try:
            eventually(lambda: self.healthy(name), lambda: process.poll() is None, log)
            yield process
            process.send_signal(signal.SIGTERM)
            grace = int(self._services[name]["stop_grace_period"].removesuffix("s"))
            assert process.wait(grace) == 0, log_tail(log)
        finally:
            process.kill()
            process.wait()


def eventually(check: Callable[[], bool], alive: Callable[[], bool], log: Path, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert alive(), log_tail(log)
        assert time.monotonic() < deadline, log_tail(log)
        time.sleep(0.5)  # a check may be a process, and take its time from what it waits for


@pytest.fixture
def host(tmp_path: Path, services: dict[str, dict[str, Any]], empty_database_url: str, redis_url: str) -> Host:
    return Host(tmp_path, services, empty_database_url, redis_url)


def test_health_checks_fail_while_nothing_listens(host: Host) -> None:
    assert not host.healthy("gateway")
    assert not host.healthy("worker-cpu")


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_the_file_as_an_operator_brings_it_up(host: Host) -> None:
    """Migrate, serve, declare as the head of the file says, join a worker, ask, stop."""
    for _ in range(2):  # each `up` runs it again
        done = host.run("migrate")
        assert done.returncode == 0, done.stderr
    with host.up("gateway"), host.up("worker-cpu"):
        printed = ""
        steps = re.findall(r"^#   docker compose exec gateway (.+)$", TEXT, re.MULTILINE)
        assert len(steps) == 5
        for step in steps:
            done = host.run("gateway", shlex.split(step))
            assert done.returncode == 0, f"{step}: {done.stderr}"
            printed = done.stdout
        key = re.search(r"sk-penstock-[\w-]+", printed)
        assert key, f"the last step prints the key, not: {printed}"
        base = f"http://127.0.0.1:{host.gateway_port}"
        message = {"role": "user", "content": "What is the capital of France?"}
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.post(
                f"{base}/v1/chat/completions",
                headers={"authorization": f"Bearer {key[0]}"},
                json={"model": "smollm2-135m-instruct", "messages": [message], "temperature": 0, "max_tokens": 16},
                timeout=60,
            )
            if answer.status_code == 200 or time.monotonic() > deadline:
                break
            time.sleep(0.5)  # the worker's next heartbeat finds the pool
        assert answer.status_code == 200, answer.text
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_the_gateway_says_what_is_missing(host: Host) -> None:
    environment = host.environment("gateway")
    del environment["DATABASE_URL"]
    command = host.command("gateway")
    done = subprocess.run(command, env=environment, cwd=host.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "DATABASE_URL is not set" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_gateways_environment_is_one_that_it_reads(host: Host) -> None:
    settings = load_settings(host.environment("gateway"))
    assert settings.drain_s == 20.0
    assert settings.fleet_token == ENVIRONMENT["PENSTOCK_FLEET_TOKEN"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("redis", {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}),
        ("cache", {"appendonly": "no", "save": "", "maxmemory-policy": "allkeys-lru", "maxmemory": str(1024**3)}),
    ],
)
def test_redis_takes_its_command(
    services: dict[str, dict[str, Any]], tmp_path: Path, name: str, expected: dict[str, str]
) -> None:
    program, *arguments = services[name]["command"]
    assert program == "redis-server"
    port = free_port()
    command = [redis_program(), *arguments, "--port", str(port), "--dir", str(tmp_path)]
    process = spawn(command, log=tmp_path / "log", death_signal=signal.SIGKILL)
    try:
        password = services[name]["environment"]["REDISCLI_AUTH"]
        with redis.Redis(port=port, password=password, decode_responses=True) as client:

            def answers() -> bool:
                try:
                    return bool(client.ping())
                except redis.ConnectionError:
                    return False

            eventually(answers, lambda: process.poll() is None, tmp_path / "log")
            assert {key: client.config_get(key)[key] for key in expected} == expected
        with redis.Redis(port=port) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
    finally:
        process.kill()
        process.wait()


def test_postgres_takes_its_arguments_and_its_health_check(
    services: dict[str, dict[str, Any]], tmp_path: Path, postgres_server: str
) -> None:
    arguments = services["postgres"]["environment"]["POSTGRES_INITDB_ARGS"].split()
    command = [postgres_program("initdb"), "-D", str(tmp_path / "data"), "-U", "penstock", "--no-sync", *arguments]
    (tmp_path / "password").write_text("secret\n")
    command.append(f"--pwfile={tmp_path / 'password'}")
    process = spawn(command, log=tmp_path / "log", death_signal=signal.SIGKILL, unprivileged=True)
    assert process.wait() == 0, log_tail(tmp_path / "log")

    kind, program, *test = services["postgres"]["healthcheck"]["test"]
    assert kind == "CMD"
    port = psycopg.conninfo.conninfo_to_dict(postgres_server)["port"]
    for wanted, at in ((0, str(port)), (2, str(free_port()))):
        check = [postgres_program(program), *test]
        assert subprocess.run(check, env={"PGPORT": at}, capture_output=True).returncode == wanted
