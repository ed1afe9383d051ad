"""Backends and routes' targets on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli
from gateway.cli.target_values import GivenTarget, TargetType, target_text
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.conftest import whole_event
from tests.ports import free_port

KEY = "sk-very-secret-key-of-a-provider"
NEW = ("backends", "set", "b", "--pool", "p", "--brand", "generic", "--base-url")


def with_input(text: str, *arguments: str) -> Result:
    result = CliRunner().invoke(cli, list(arguments), input=text)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def pool(penstock: Penstock) -> Penstock:
    ok(penstock("pool", "set", "p"))
    return penstock


class Server(BaseHTTPRequestHandler):
    """Speaks a little of OpenAI's API, and asks for ``KEY``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b'{"object": "list", "data": [{"id": "small"}, {"id": "large"}]}')

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {KEY}":
            self._answer(401, json.dumps({"error": {"message": f"not {self.headers['authorization']}"}}).encode())
        elif body["model"] != "small":
            self._answer(404, b'{"error": {"message": "no such model"}}')
        elif self.path == "/v1/embeddings":
            self._answer(200, b'{"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": 1, "total_tokens": 1}}')
        elif body.get("stream"):
            chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "length"}]}
            usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
            events = "".join(f"data: {json.dumps(each)}\n\n" for each in (chunk, usage))
            self._answer(200, f"{events}data: [DONE]\n\n".encode(), "text/event-stream")
        else:
            self._answer(200, whole_event())

    def _answer(self, status: int, body: bytes, media_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_backends_are_declared_changed_and_deleted(pool: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    monkeypatch.setenv("PROVIDER_ORG", "secret-organisation")
    refused(pool("backends", "set", "b", "--pool", "p"), "--brand", "--base-url")
    made = pool(
        *(*NEW, "https://api.example.com/v1", "--api-key-env", "PROVIDER_KEY"),
        *("--header", "x-plain=1", "--header-env", "x-org=PROVIDER_ORG", "--weight", "2", "--idle-timeout", "9"),
    )
    assert ok(made).splitlines()[1].split() == [
        *("b", "p", "generic", "https://api.example.com", "yes", "-", "131072", "2", "0", "enabled", "1"),
    ]
    assert "penstock backends test b" in made.stderr
    shown = ok(pool("backend", "show", "b"))
    assert "headers: x-org, x-plain\n" in shown
    assert "idle_timeout_s: 9.0\n" in shown
    ok(pool("backends", "add", "b", "--model", "m", "--idle-timeout", "none", "--if-version", "1"))
    refused(pool("backends", "set", "b", "--weight", "3", "--if-version", "1"), "version 2")
    assert "idle_timeout_s: -\n" in ok(pool("backends", "show", "b"))
    assert ok(pool("backends", "disable", "b")) == "Backend b is disabled.\n"
    assert "disabled" in ok(pool("backends", "list"))
    assert ok(pool("backends", "list", "--pool", "other")) == "There are none.\n"
    ok(pool("backends", "enable", "b"))
    ok(pool("route", "set", "m", "--pool", "p", "--context-length", "100"))
    assert ok(pool("pool", "show", "p")) == "Routes: m\nBackends: b\nWorkers: none\n"
    refused(pool("pool", "show", "nope"), "no pool")
    ok(pool("route", "delete", "m"))
    refused(pool("pool", "delete", "p"), "backends use the pool 'p' (b)")
    refused(pool("backends", "set", "b", "--base-url", "https://elsewhere.example.com"), "api_key", "given anew")
    ok(pool("backends", "set", "b", "--api-key", "none", "--header", "none"))
    ok(pool("backends", "remove", "b"))
    refused(pool("backends", "show", "b"), "penstock backends list")
    ok(pool("pool", "delete", "p"))


def test_a_key_is_read_from_prompt_input_or_environment_and_shown_nowhere(
    pool: Penstock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY + "3")
    told = [with_input(f"{KEY}\n", *NEW, "http://127.0.0.1:1", "--api-key")]
    told.append(with_input(f"{KEY}2\n", "backends", "set", "b", "--api-key", "-"))
    told.append(pool("backends", "set", "b", "--api-key-env", "PROVIDER_KEY"))
    told += [pool("backends", "show", "b"), pool("backends", "list"), pool("audit"), pool("backends", "test", "b")]
    told.append(pool("backends", "set", "b", "--api-key", KEY))
    told.append(pool("backends", "set", "b", "--api-key-env", "NOT_THERE"))
    assert [each.exit_code for each in told] == [0, 0, 0, 0, 0, 0, 1, 2, 2]
    assert "shell's history" in told[-2].stderr
    assert all("very-secret" not in each.output for each in told)
    assert ok(pool("backends", "list")).split()[-1] == "3"  # each of them changed it
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT api_key, audit_log::text FROM backends, audit_log").fetchall()
    assert all(KEY.encode() not in sealed and "very-secret" not in audited for sealed, audited in rows)


def test_another_secret_key_than_the_gateways_is_noticed(pool: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    with_key = (*NEW, "http://127.0.0.1:1", "--api-key-env", "PROVIDER_KEY")
    assert "Beware" not in pool(*with_key).stderr
    monkeypatch.setenv("PENSTOCK_SECRET_KEY", "another-key-of-thirty-two-letters-or-more")
    assert "the secrets of b cannot be read" in pool(*with_key[:2], "c", *with_key[3:]).stderr
    assert "Beware" not in pool("backends", "set", "d", *NEW[3:], "http://127.0.0.1:1").stderr
    refused(pool("backends", "test", "b"), "sealed by another PENSTOCK_SECRET_KEY")
    monkeypatch.delenv("PENSTOCK_SECRET_KEY")
    ok(pool("backends", "set", "b", "--weight", "2"))


def test_a_backend_is_tried_step_by_step(pool: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    with serving() as url:
        ok(pool(*NEW, url, "--api-key-env", "PROVIDER_KEY"))
        lines = ok(pool("backends", "test", "b", "--embeddings")).splitlines()
        assert [line.split()[:2] for line in lines] == [
            ["ok", step] for step in ("connect", "models", "chat", "stream", "embeddings")
        ]
        assert "lists small, large; small is tried" in lines[1]
        assert "usage told: 9 tokens in, 3 out" in lines[2]
        assert "usage told: 3 tokens in, 1 out" in lines[3]
        unknown = pool("backends", "test", "b", "--model", "huge")
        assert unknown.exit_code == 1
        assert "does not list huge" in unknown.stdout
        assert "FAIL  chat" in unknown.stdout
        assert "--model" in unknown.stdout
        ok(with_input("wrong-secret\n", "backends", "set", "b", "--api-key", "-"))
        wrong = pool("backends", "test", "b")
        assert wrong.exit_code == 1
        assert wrong.stdout.splitlines()[-1].startswith("FAIL  chat")  # and no more: all would fail so
        assert "API key" in wrong.stdout
        assert "wrong-secret" not in wrong.output
    for base_url, words in (
        (f"http://127.0.0.1:{free_port()}", ["FAIL  connect", "is the server up"]),
        ("http://nowhere.invalid", ["FAIL  connect", "cannot be resolved"]),
    ):
        ok(pool("backends", "set", "b", "--base-url", base_url, "--api-key", "none"))
        down = pool("backends", "test", "b")
        assert down.exit_code == 1
        assert len(down.stdout.splitlines()) == 1
        for word in words:
            assert word in down.stdout


def test_targets_of_a_route(pool: Penstock) -> None:
    ok(pool("pool", "set", "q:1"))
    new = ("route", "set", "m", "--context-length", "100")
    ok(pool(*new, "--target", "p:model=org/a,weight=3", "--target", "q:1,priority=1"))
    assert "m      p:model=org/a,weight=3 q:1:model=m,priority=1  " in ok(pool("route", "list"))
    shown = ok(pool("route", "set", "m", "--timeout", "7"))
    assert "p:model=org/a,weight=3 q:1:model=m,priority=1" in shown
    assert "q:1:model=m  " in ok(pool("route", "set", "m", "--target", "q:1"))
    assert "q:1:model=m  " in ok(pool("route", "set", "m", "--target", "q:1"))
    assert ok(pool("route", "list")).split()[-1] == "3"
    refused(pool(*new, "--target", "p", "--pool", "p"), "not both")
    refused(pool(*new, "--target", "nowhere"), "penstock pool set nowhere")
    refused(pool(*new, "--target", "p:weight=2"), "a colon where a comma belongs")


def test_a_pool_may_be_called_none(pool: Penstock) -> None:
    refused(pool(*NEW, "http://127.0.0.1:1", "--pool", "none"), "penstock pool set none")
    ok(pool("pool", "set", "none"))
    ok(pool(*NEW, "http://127.0.0.1:1", "--pool", "none", "--model", "none", "--idle-timeout", "none"))
    assert "Backends: b\n" in ok(pool("pool", "show", "none"))


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("p", GivenTarget("p")),
        ("p:model=a:b,weight=0.5,priority=2", GivenTarget("p", "a:b", 0.5, 2)),
        ("a/p:1,model=m", GivenTarget("a/p:1", "m")),
        *((bad, None) for bad in ("", ":model=m", "p:model=", "p,weight=x", "p,priority=1.5", "p,x=1", "p,weight")),
        *((bad, None) for bad in ("p,weight=1,weight=2", "p:model=a,model=b", "p,", "p:weight=2")),
    ],
)
def test_a_target_reads_as_it_is_shown(text: str, given: GivenTarget | None) -> None:
    if given is None:
        with pytest.raises(Exception, match=r"target|names no|none of|no number|colon"):
            TargetType().convert(text, None, None)
        return
    assert TargetType().convert(text, None, None) == given
    target = given.named("route")
    assert TargetType().convert(target_text(target), None, None).named("other") == target
