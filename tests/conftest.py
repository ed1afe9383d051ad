"""Real services for the tests: one Postgres and one Redis a session, a fresh database and an empty Redis a test.

``TEST_DATABASE_URL`` and ``TEST_REDIS_URL`` name servers of your own instead. Their user must be allowed to create
databases, and the Redis database they name is emptied before each test. ``TEST_REDIS_URL=cluster`` runs the tests on a
Redis Cluster of three nodes that is started for them.

Under ``pytest -n N`` each of the N processes is a session of its own, with servers of its own.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from sqlalchemy.engine import URL, make_url

from gateway.local import services
from gateway.local.services import EmbeddedPostgres, EmbeddedRedis
from gateway.redis_url import client
from tests import ports
from tests.redis_cluster import RedisCluster
from worker.execution import threads

pytest_plugins = ("tests.parallel",)

# A busy machine is no fault of a test: neither how long one case takes nor how long its making does says anything.
hypothesis_settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("suite")

# Before anything imports torch, whose threads must not spin while others want the cores. Nor may they be bound to
# cores: this process, and all servers, which inherit it, would sit on the first one.
os.environ["OMP_PROC_BIND"] = "false"
os.environ.update(threads.environment(None, os.environ))


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.fixture(scope="session", autouse=True)
def _ports_of_services() -> Iterator[None]:
    """Embedded servers, too, keep their ports while they are down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "free_port", ports.free_port)
        yield


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Postgres server's own database; tests want ``database_url``."""
    if given := os.environ.get("TEST_DATABASE_URL"):
        yield given
        return
    service = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), durable=False)
    yield service.start()
    service.stop()


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis server; tests want ``redis_url``."""
    if given := os.environ.get("TEST_REDIS_URL"):
        yield request.getfixturevalue("redis_cluster").url if given == "cluster" else given
        return
    service = EmbeddedRedis(tmp_path_factory.mktemp("redis"), durable=False)
    yield service.start()
    service.stop()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster of three masters that all tests share: leave its nodes and slots as they are."""
    cluster = RedisCluster(tmp_path_factory.mktemp("redis_cluster"))
    cluster.start()
    yield cluster
    cluster.stop()


def _create_database(server: str, name: str, *, template: str | None = None) -> str:
    with psycopg.connect(server, autocommit=True) as connection:
        # Copied as files, which is quicker than through the log on a server that syncs nothing.
        copied = f'TEMPLATE "{template or "template1"}" STRATEGY FILE_COPY'
        connection.execute(f'CREATE DATABASE "{name}" {copied}')
    return _text(make_url(server).set(database=name))


def _drop_database(server: str, name: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def migrated_template(postgres_server: str) -> Iterator[str]:
    """Name of a migrated database that nobody is connected to, to be copied."""
    from gateway.db.migrate import upgrade

    name = f"template_{uuid.uuid4().hex[:12]}"
    upgrade(_create_database(postgres_server, name))
    yield name
    _drop_database(postgres_server, name)


class _Databases:
    """Makes the next test's database while this one runs, and drops them behind it."""

    def __init__(self, server: str, template: str, worker: ThreadPoolExecutor) -> None:
        self._server = server
        self._template = template
        self._worker = worker
        self._next = self._make()

    def _make(self) -> Future[str]:
        name = f"test_{uuid.uuid4().hex[:12]}"
        return self._worker.submit(_create_database, self._server, name, template=self._template)

    def take(self) -> str:
        taken, self._next = self._next, self._make()
        return taken.result()

    def last(self) -> str:
        """The one that no test will take."""
        return self._next.result()

    def drop(self, url: str) -> None:
        name = make_url(url).database
        assert name is not None
        self._worker.submit(_drop_database, self._server, name)


@pytest.fixture(scope="session")
def databases(postgres_server: str, migrated_template: str) -> Iterator[_Databases]:
    with ThreadPoolExecutor(1) as worker:
        made = _Databases(postgres_server, migrated_template, worker)
        yield made
        made.drop(made.last())


@pytest.fixture
def database_url(databases: _Databases) -> Iterator[str]:
    """A migrated database of this test's own, without rows."""
    url = databases.take()
    yield url
    databases.drop(url)


@pytest.fixture
def empty_database_url(postgres_server: str) -> Iterator[str]:
    """A database of this test's own that no migration has touched."""
    name = f"empty_{uuid.uuid4().hex[:12]}"
    yield _create_database(postgres_server, name)
    _drop_database(postgres_server, name)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis database."""
    with client(redis_server) as connected:
        connected.flushdb()
    return redis_server


@pytest.fixture
def redis_cluster_url(redis_cluster: RedisCluster) -> str:
    """URL of an empty Redis Cluster."""
    with client(redis_cluster.url) as connected:
        connected.flushdb()
    return redis_cluster.url


@pytest.fixture
def services_dir(tmp_path: Path) -> Path:
    """Where a test that stops or kills a service of its own keeps that service's data."""
    return tmp_path / "services"
