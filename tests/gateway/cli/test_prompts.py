"""What was said, read, exported, asked again and erased from the command line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import Result

from gateway.admission.redis import create_redis
from gateway.cache.agreement import Agreements
from gateway.cache.store import BODY, ORIGIN, Put, Store
from gateway.clock import SystemClock
from gateway.datakeys.master_keys import MasterKeys
from gateway.datakeys.service import DataKeys
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.entry import Entry
from gateway.promptlog.log import PromptLog
from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory
from gateway.tenants.end_users import end_user_hash
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened
from tests.gateway.promptlog.support import FULL, METADATA, REDACTED, Digits, answer, body, entry

SECRET = "secret-key-of-the-tests-of-this-command"
MASTER, NEWER = "master-key-of-the-tests-of-this-command", "newer-master-key-of-tests-of-this-command"


def log(
    database: str, redis: str, *said: tuple[PromptLogPolicy, dict[str, Any]], master: str | None = None
) -> list[Entry]:
    """Written as a gateway does, for the tenant ``acme``."""

    async def write() -> list[Entry]:
        async with opened(database, pool_size=2) as engine:
            tenant = await Directory(engine, SystemClock()).tenant("acme")
            masters = MasterKeys.configured(SECRET, master, None)
            entries = []
            async with (
                DataKeys(engine, masters, SystemClock()) as keys,
                PromptLog(create_redis(redis, timeout_s=5), keys, SystemClock(), Digits) as log,
            ):
                for policy, fields in said:
                    if (name := fields.pop("user", None)) is not None:
                        fields["end_user"] = end_user_hash(SecretKey(SECRET), tenant.id, name)
                    entries.append(entry(tenant.id, **fields))
                    log.record(policy, entries[-1])
                await log.flush()
            return entries

    return asyncio.run(write())


@pytest.fixture
def acme(penstock: Penstock, redis_url: str) -> Penstock:
    if redis_url.startswith("redis+cluster"):
        pytest.skip("the prompt log wants one server, not a cluster")
    ok(penstock("tenant", "create", "acme"))
    return penstock


def ids(told: str) -> list[str]:
    return [json.loads(line)["entry"]["request_id"] for line in told.splitlines()]


def test_prompts_are_listed_searched_shown_and_exported(
    acme: Penstock, database_url: str, redis_url: str, tmp_path: Any
) -> None:
    assert "none" in ok(acme("prompts", "list", "--tenant", "acme"))
    one, two = log(
        database_url,
        redis_url,
        (FULL, {"text": "Where is the Sphinx?", "user": "ann"}),
        (FULL, {"text": "And the \x1b[31mOracle?", "model": "large", "status": "failed"}),
    )
    lines = [line.split() for line in ok(acme("prompts", "list", "--tenant", "acme")).splitlines()]
    assert [line[1] for line in lines[1:]] == [str(two.request_id), str(one.request_id)]
    listed = ("prompts", "list", "--tenant", "acme", "--json")
    for option, value, wanted in (
        ("--model", "large", two),
        ("--status", "failed", two),
        ("--end-user", "ann", one),
        ("--end-user-hash", one.end_user, one),
        ("--limit", "1", two),
    ):
        assert ids(ok(acme(*listed, option, str(value)))) == [str(wanted.request_id)], option
    assert ok(acme(*listed, "--end", "2020-01-01")) == ""
    assert ids(ok(acme("prompts", "search", "sphinx", "--tenant", "acme", "--json"))) == [str(one.request_id)]
    shown = ok(acme("prompts", "show", str(two.request_id), "--tenant", "acme"))
    assert "\x1b" not in shown
    assert json.loads(shown)["request"]["messages"][0]["content"] == "And the \x1b[31mOracle?"
    exported = ok(acme("prompts", "export", "--tenant", "acme"))
    assert ids(exported) == [str(one.request_id), str(two.request_id)]
    ok(acme("prompts", "export", "--tenant", "acme", "--output", str(tmp_path / "out")))
    assert (tmp_path / "out").read_text() == exported
    refused(acme("prompts", "list", "--tenant", "globex"), "penstock tenant list")
    refused(acme("prompts", "show", str(two.project_id), "--tenant", "acme"), "penstock prompts list")
    audited = [line.split()[2:4] for line in ok(acme("audit", "--kind", "prompt")).splitlines()[1:]]
    assert audited == [[deed, "prompt"] for deed in ("read", "export", "export", "read", "search")]


def test_what_is_erased_is_gone(acme: Penstock, database_url: str, redis_url: str) -> None:
    one, two, three = log(
        database_url, redis_url, (FULL, {"user": "ann"}), (FULL, {"user": "bob"}), (FULL, {"user": "bob"})
    )
    erase = ("prompts", "erase", "--tenant", "acme")
    assert "Erase all" in acme(*erase).stderr  # asks, and nobody says yes
    refused(acme(*erase, "--yes", "--end-user", "ann", "--request", str(two.request_id)), "name one of")
    listed = ("prompts", "list", "--tenant", "acme", "--json")
    for options, left in (
        (("--end-user", "ann"), [three, two]),
        (("--request", str(two.request_id)), [three]),
        ((), []),
    ):
        receipt = json.loads(ok(acme(*erase, "--yes", *options)))
        assert receipt["counts"]["logged_prompts"] == 1, options
        assert receipt["unfinished"] == {}
        assert ids(ok(acme(*listed))) == [str(each.request_id) for each in left]
    assert receipt["counts"].keys() >= {"data_keys", "cached_answers", "idempotency_answers", "stored_responses"}
    assert str(one.end_user) in ok(acme("audit", "--kind", "prompt", "--json"))


class _Model(BaseHTTPRequestHandler):
    """A gateway that repeats what it was asked."""

    def do_POST(self) -> None:
        self.server.seen.append((self.path, dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))  # type: ignore[attr-defined]
        refuse = self.headers["authorization"] != "Bearer sk-good"
        told = b'{"error": {"message": "bad key"}}' if refuse else answer("Now I say:\nParis")
        self.send_response(401 if refuse else 200)
        self.send_header("content-length", str(len(told)))
        self.send_header("x-penstock-backend", "w9")
        self.send_header("x-penstock-cost-usd", "0.000002000")
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def gateway() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Model) as server:
        server.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_request_is_asked_again(
    acme: Penstock, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = body("Capital of France? 12345", stream=True, stream_options={"include_usage": True}, temperature=0)
    whole, redacted, bare, message = log(
        database_url,
        redis_url,
        (FULL, {"request": asked, "response": answer("Paris, of course")}),
        (REDACTED, {"request": asked}),
        (METADATA, {"request": asked}),
        (FULL, {"request": asked, "api": "messages"}),
    )
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    with gateway() as server:

        def replay(of: Entry, *options: str) -> Result:
            url = f"http://127.0.0.1:{server.server_port}/"
            return acme("prompts", "replay", str(of.request_id), "--tenant", "acme", "--url", url, *options)

        assert "PENSTOCK_API_KEY" in replay(whole).stderr
        monkeypatch.setenv("PENSTOCK_API_KEY", "sk-good")
        told = ok(replay(whole, "--model", "large"))
        path, headers, sent = server.seen[-1]
        assert (path, headers["x-penstock-cache"]) == ("/v1/chat/completions", "off")
        wanted = json.loads(asked) | {"model": "large"}
        assert json.loads(sent) == {name: wanted[name] for name in ("model", "messages", "temperature")}
        rows = [[cell.strip() for cell in line.split("|")] for line in told.splitlines()]
        assert rows[0] == ["THEN", "NOW"]
        assert rows[1] == ["m at worker-1", "large at w9"]
        assert rows[4] == ["Paris, of course", "Now I say:"]
        assert rows[5] == ["", "Paris"]
        both = json.loads(ok(replay(whole, "--json")))
        assert (both["then"]["text"], both["now"]["charged_usd"]) == ("Paris, of course", "0.000002000")
        assert "redacted" in replay(redacted).stderr
        assert "12345" not in server.seen[-1][2].decode()
        ok(replay(message))
        assert server.seen[-1][0] == "/v1/messages"
        refused(replay(bare), "without its body")
        refused(replay(whole, "--key", "sk-bad"), "401", "bad key")
    refused(replay(whole), "no gateway answers")


def test_data_keys_are_wrapped_by_the_new_master_key(
    acme: Penstock, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(database_url, redis_url, (FULL, {}), (FULL, {"user": "ann"}), master=MASTER)
    listed = ("prompts", "list", "--tenant", "acme", "--json")
    monkeypatch.setenv("PENSTOCK_MASTER_KEY", NEWER)
    refused(acme(*listed), "PENSTOCK_PREVIOUS_MASTER_KEY")
    missing = acme("prompts", "rewrap")
    assert (missing.exit_code, "2 are wrapped" in missing.stderr) == (1, True)
    monkeypatch.setenv("PENSTOCK_PREVIOUS_MASTER_KEY", MASTER)
    assert len(ids(ok(acme(*listed)))) == 2
    assert ok(acme("prompts", "rewrap")).startswith("2 data keys are")
    monkeypatch.delenv("PENSTOCK_PREVIOUS_MASTER_KEY")
    assert len(ids(ok(acme(*listed)))) == 2
    assert ok(acme("prompts", "rewrap")).startswith("0 data keys are")


def test_what_is_missing_is_told(acme: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(acme("prompts", "list", "--tenant", "acme", "--end-user", "a", "--end-user-hash", "b"), "--end-user")
    monkeypatch.setenv("CACHE_REDIS_URL", "redis://127.0.0.1:1/0")
    refused(acme("prompts", "list", "--tenant", "acme"), "CACHE_REDIS_URL")
    refused(acme("cache", "purge", "--tenant", "acme", "--yes"), "CACHE_REDIS_URL")
    refused(acme("cache", "agreement", "--tenant", "acme"), "CACHE_REDIS_URL")
    monkeypatch.delenv("CACHE_REDIS_URL")
    monkeypatch.setenv("REDIS_URL", "redis+cluster://127.0.0.1:1")
    refused(acme("prompts", "list", "--tenant", "acme"), "CACHE_REDIS_URL")


def test_kept_answers_are_purged_and_agreement_is_told(acme: Penstock, database_url: str, redis_url: str) -> None:
    async def count() -> None:
        async with opened(database_url, pool_size=1) as engine:
            tenant = await Directory(engine, SystemClock()).tenant("acme")
        redis = create_redis(redis_url, timeout_s=5)
        for agreed in (True, True, True, False):
            await Agreements(redis).count(tenant.id, agreed, datetime.now(UTC))
        await Store(redis).put(Put(tenant.id, "one", b"", 60, 10_000, {BODY: b"sealed", ORIGIN: "r1"}))
        await redis.close()

    assert ok(acme("cache", "agreement", "--tenant", "acme")).splitlines()[1].split() == ["0", "0", "0", "-"]
    asyncio.run(count())
    told = ok(acme("cache", "agreement", "--tenant", "acme")).splitlines()[1].split()
    assert told == ["4", "3", "1", "25.00%"]
    assert "Forget all" in acme("cache", "purge", "--tenant", "acme").stderr
    assert ok(acme("cache", "purge", "--tenant", "acme", "--tag", "red")).startswith("0 kept")
    assert ok(acme("cache", "purge", "--tenant", "acme", "--yes")).startswith("1 kept answer is")
    refused(acme("cache", "purge", "--tenant", "acme", "--tag", ""), "tag")
    audited = [line.split()[2:5] for line in ok(acme("audit", "--kind", "answer_cache")).splitlines()[1:]]
    assert audited == [["purge", "answer_cache", "all"]] * 2
