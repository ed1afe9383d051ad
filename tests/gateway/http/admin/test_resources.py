from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from sqlalchemy import text

from tests.gateway.http.admin.support import client_of, made, problem
from tests.gateway.tenants.support import ACTOR

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def ask(gateway: Any, key: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        return await client.post(CHAT, json=ASK, headers={"authorization": f"Bearer {key}"})


async def whole(c: Any) -> None:
    await c.whole()


async def test_a_new_administrator_sets_up_a_tenant_that_can_call(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(whole))
    async with client_of(gateway) as client:
        tenant = await made(client, "/tenants", name="globex", timezone="Europe/Berlin", markup_bp=2000)
        key = await made(client, "/tenants/globex/keys", name="production", max_output_tokens=100)
        limit = await made(client, "/tenants/globex/limits", metric="budget", window="month", amount_usd="12.50")
        assert (limit["amount"], limit["amount_usd"]) == (12_500_000_000, "12.500000000")
        assert (await ask(gateway, key["secret"])).status_code == 200
        problem(
            await client.post("/tenants/globex/limits", json={"metric": "requests", "amount": 0}), 400, "per minute"
        )
        await made(client, "/tenants/globex/limits", metric="requests", window="minute", amount=0)
        assert (await ask(gateway, key["secret"])).status_code == 429  # at once
        entries = (await client.get("/audit", params={"tenant": tenant["id"]})).json()["data"]
        whoami = (await client.get("/whoami")).json()
        assert {entry["actor"] for entry in entries} == {whoami["key_id"]}
        assert [(entry["action"], entry["kind"]) for entry in entries][::-1] == [
            ("create", "tenant"),
            ("create", "project"),
            ("create", "key"),
            ("create", "limit"),
            ("create", "limit"),
        ]
        assert key["secret"] not in (await client.get("/audit")).text


async def test_a_secret_is_told_once_rotated_and_revoked(gateway: Any) -> None:
    async with client_of(gateway) as client:
        answer = await client.post("/tenants/acme/keys", json={"name": "k", "allowed_models": ["m"]})
        assert answer.headers["cache-control"] == "no-store"
        first = answer.json()
        path = f"/tenants/acme/keys/{first['id']}"
        for shown in (await client.get(path), await client.get("/tenants/acme/keys")):
            assert first["secret"] not in shown.text
        second = (await client.post(f"{path}/rotate", json={"grace_s": 3600})).json()
        assert second["previous_until"] is not None
        third = (await client.post(f"{path}/rotate", json={})).json()

        async def lists(secret: str) -> int:
            url = gateway.url + "/v1/models"
            return (await client.get(url, headers={"authorization": f"Bearer {secret}"})).status_code

        assert [await lists(each["secret"]) for each in (first, second, third)] == [401, 401, 200]
        revoked = await client.delete(path)
        assert revoked.json()["revoked_at"] is not None
        assert await lists(third["secret"]) == 401
        problem(await client.patch(path, json={"name": "other"}), 409, "revoked")
        assert (await client.delete(path)).json() == revoked.json()


async def test_a_patch_changes_what_it_names(gateway: Any) -> None:
    async with client_of(gateway) as client:
        before = (await client.patch("/tenants/acme", json={"webhook_url": "https://example.com/hook"})).json()
        assert before.pop("webhook_secret").startswith("whsec_")
        after = (await client.patch("/tenants/acme", json={"weight": 2})).json()
        assert after == before | {"weight": 2.0, "version": before["version"] + 1}
        assert (await client.patch("/tenants/acme", json={})).json() == after
        merge = {"content-type": "application/merge-patch+json"}
        cleared = await client.patch("/tenants/acme", content=b'{"webhook_url": null}', headers=merge)
        assert cleared.json()["webhook_url"] is None
        assert (await client.patch("/tenants/acme/projects/default", json={})).status_code == 200
        assert (await client.patch("/tenants/acme/projects/default", json={"name": "main"})).json()["name"] == "main"


async def test_if_match_holds_off_who_read_an_older_state(gateway: Any) -> None:
    async with client_of(gateway) as client:
        projects = (await client.get("/tenants/acme/projects")).json()["data"]
        key = await made(client, "/tenants/acme/keys", name="k")
        limit = await made(client, "/tenants/acme/limits", metric="concurrent", amount=1)
        prices = (await client.get("/prices", params={"route": "m"})).json()["data"]
        admin = await made(client, "/admin-keys", name="a", role="viewer")
        await made(client, "/pools", name="unused")
        changes: list[tuple[str, dict[str, Any] | None]] = [
            ("/pools/unused", None),
            (f"/prices/{prices[0]['id']}", {"effective_until": "2100-01-01T00:00:00Z"}),
            ("/routes/m", {"timeout_s": 5}),
            (f"/admin-keys/{admin['id']}", {"name": "other"}),
            (f"/tenants/acme/limits/{limit['id']}", {"amount": 5}),
            (f"/tenants/acme/keys/{key['id']}", {"max_output_tokens": 5}),
            (f"/tenants/acme/projects/{projects[0]['id']}", {"name": "other"}),
            ("/tenants/acme", {"weight": 2}),
        ]
        for path, change in changes:
            await _change_by_version(client, path, change)


async def _change_by_version(client: httpx.AsyncClient, path: str, change: dict[str, Any] | None) -> None:
    now = old = (await client.get(path)).headers["etag"]
    if change is not None:
        first = await client.patch(path, json=change, headers={"if-match": old})
        assert first.status_code == 200, first.text
        now = first.headers["etag"]
        assert now != old
        late = await client.patch(path, json=change, headers={"if-match": old})
        problem(late, 412, "Read it again")
        assert late.headers["etag"] == now
        problem(await client.delete(path, headers={"if-match": old}), 412)
    for stale in ('"99"', '"of another service"'):
        problem(await client.delete(path, headers={"if-match": stale}), 412)
    problem(await client.delete(path, headers={"if-match": '"1", "2"'}), 400, "one entity tag")
    assert (await client.delete(path, headers={"if-match": now})).status_code in (200, 204)


async def test_every_name_that_can_be_given_is_found_by_its_path(gateway: Any) -> None:
    async with client_of(gateway) as client:
        await made(client, "/pools", name="p")
        for name in ("a/b", "a:b", "a..b", "a.", "a/_-:b./c"):
            await made(client, "/pools", name=name)  # it looks where `location` points
            await made(client, "/routes", name=name, pool="p", context_length=10)
        for name in ("a//b", "a/", "a/.", "a/../b", "x" * 101):
            for path, more in (("/pools", {}), ("/routes", {"pool": "p", "context_length": 10})):
                problem(await client.post(path, json={"name": name, **more}), 400)


async def test_lists_come_in_pages(gateway: Any) -> None:
    async with client_of(gateway) as client:
        for number in range(4):
            await made(client, "/tenants", name=f"t{number}")
            await made(client, "/tenants/acme/projects", name=f"p{number}")
            await made(client, "/tenants/acme/keys", name=f"k{number}")
            await made(
                client,
                "/tenants/acme/limits",
                metric="budget",
                window=["day", "week", "month", "total"][number],
                amount_usd="1",
            )
            await made(client, "/pools", name=f"pool{number}")
            backend = {"pool": "pool", "brand": "generic", "base_url": "http://127.0.0.1:1"}
            await made(client, "/backends", name=f"b{number}", **backend)
            await made(client, "/routes", name=f"org/route{number}", pool="pool", context_length=100)
            begin = (datetime.now(UTC) + timedelta(days=number + 1)).isoformat()
            await made(
                client, "/prices", route="m", input_usd_per_mtok="0.15", output_usd_per_mtok="1", effective_from=begin
            )
            await made(client, "/admin-keys", name=f"a{number}", role="viewer")
        paths = [
            "/tenants",
            "/tenants/acme/projects",
            "/tenants/acme/keys",
            "/tenants/acme/limits",
            "/pools",
            "/backends",
            "/routes",
        ]
        for path in [*paths, "/prices?route=m", "/admin-keys", "/audit"]:
            whole_list = (await client.get(path, params=_with(path, limit=500))).json()
            assert whole_list["next"] is None
            assert len(whole_list["data"]) >= 4
            found: list[Any] = []
            after: dict[str, str] = {}
            while True:
                page = (await client.get(path, params=_with(path, limit=3, **after))).json()
                assert len(page["data"]) <= 3
                found += page["data"]
                if page["next"] is None:
                    break
                after = {"after": page["next"]}
            assert found == whole_list["data"], path
            for bad in ("0", "501", "x"):
                problem(await client.get(path, params=_with(path, limit=bad)), 400, "limit")
        problem(await client.get("/tenants", params={"after": "\x00"}), 400, "after")
        problem(await client.get("/tenants", params={"tenannt": "x"}), 400, "tenannt")


def _with(path: str, **parameters: Any) -> dict[str, Any]:
    query = path.partition("?")[2]
    return dict([pair.split("=") for pair in query.split("&")] if query else []) | parameters


async def test_prices_are_text_and_end(gateway: Any) -> None:
    async with client_of(gateway) as client:
        route = await made(client, "/routes", name="org/new", pool="pool", context_length=1000)
        assert (route["backend_model"], route["default_output_tokens"], route["max_output_tokens"]) == (
            "org/new",
            512,
            1000,
        )
        price = await made(client, "/prices", route="org/new", input_usd_per_mtok="0.15", output_usd_per_mtok="0.6")
        assert (price["input_usd_per_mtok"], price["output_usd_per_mtok"]) == ("0.15", "0.60")
        own = await made(
            client, "/prices", route="org/new", tenant="acme", input_usd_per_mtok="0", output_usd_per_mtok="1"
        )
        listed = (await client.get("/prices", params={"route": "org/new", "tenant": "acme"})).json()["data"]
        assert [each["id"] for each in listed] == [own["id"]]
        for wrong in (0.15, "1e-3", "-1", "0.0000000001", "nan", "20000"):
            body = {"route": "org/new", "input_usd_per_mtok": wrong, "output_usd_per_mtok": "1"}
            told = problem(await client.post("/prices", json=body), 400, "input_usd_per_mtok")
            assert told["errors"][0]["field"] == "input_usd_per_mtok"
        ended = await client.delete(f"/prices/{price['id']}")
        assert ended.json()["effective_until"] is not None
        problem(await client.delete(f"/prices/{price['id']}"), 409, "ended")
        imported = await client.post(
            "/prices/import", json={"route": "org/new", "provider": "openai", "model": "gpt-4o", "basis": "cost"}
        )
        assert imported.status_code == 201
        assert "genai-prices" in imported.json()["source"]
        free = {"route": "org/new", "provider": "azure", "model": "davinci"}
        notes = (await client.post("/prices/import", json=free)).json()["notes"]
        assert any("no price for output" in note for note in notes)
        assert (await client.delete("/routes/org/new")).status_code == 204
        problem(await client.get("/routes/org/new"), 404, "org/new")


async def test_what_cannot_be_is_told_with_its_field(gateway: Any) -> None:
    async with client_of(gateway) as client:
        problem(await client.post("/tenants", json={"name": "acme"}), 409, "exists already")
        problem(await client.post("/pools", json={"name": "pool"}), 409, "choose another")
        problem(await client.delete("/pools/pool"), 409, "use the pool")
        problem(await client.post("/tenants/acme/projects", json={"name": "default"}), 409)
        await made(client, "/tenants/acme/limits", metric="concurrent", amount=1)
        problem(await client.post("/tenants/acme/limits", json={"metric": "concurrent", "amount": 2}), 409, "change it")
        bodies: list[tuple[dict[str, Any], str]] = [
            ({}, ""),
            ({"name": 5}, "name"),
            ({"name": "t", "markup_bp": "5"}, "markup_bp"),
            ({"name": "t", "markup": 5}, "markup"),
            ({"name": "t", "weight": 0}, "weight"),
            ({"name": "-"}, "name"),
        ]
        for body, field in bodies:
            told = problem(await client.post("/tenants", json=body), 400, field)
            if field:
                assert field in told["errors"][0]["detail"]
        problem(await client.post("/tenants", json={"name": "t", "timezone": "Mars/Olympus"}), 400, "time zone")
        for metric, extra, word in (
            ("budget", {"window": "day", "amount": 5}, "amount_usd"),
            ("budget", {"window": "day"}, "amount_usd"),
            ("budget", {"window": "day", "amount_usd": 12.5}, "amount_usd"),
            ("budget", {"window": "day", "amount_usd": "9999999999"}, "9,000,000"),
            ("requests", {"window": "day", "amount_usd": "5"}, "amount"),
            ("requests", {"window": "month", "amount": 5}, "per minute"),
        ):
            problem(await client.post("/tenants/acme/limits", json={"metric": metric, **extra}), 400, word)
        for content, media_type, status in (
            (b"{", "application/json", 400),
            (b"", "application/json", 400),
            (b"[" * 100_000, "application/json", 400),
            (b'{"name": "\xff"}', "application/json", 400),
            (b"name=t", "application/x-www-form-urlencoded", 415),
            (b"{}" + b" " * 300_000, "application/json", 413),
        ):
            answer = await client.post("/tenants", content=content, headers={"content-type": media_type})
            problem(answer, status)
        problem(await client.put("/tenants", json={}), 405)


async def test_an_archived_tenant_is_out_of_the_list_and_cannot_be_changed(gateway: Any) -> None:
    async with client_of(gateway) as client:
        assert (await client.delete("/tenants/acme")).json()["archived_at"] is not None
        assert (await client.get("/tenants")).json()["data"] == []
        listed = (await client.get("/tenants", params={"archived": "true"})).json()["data"]
        assert [each["name"] for each in listed] == ["acme"]
        assert (await client.get("/tenants/acme")).status_code == 200
        problem(await client.patch("/tenants/acme", json={"weight": 2}), 409, "archived")
        problem(await client.delete("/tenants/acme"), 409, "archived")
        answer = await client.get(gateway.url + "/v1/models", headers={"authorization": f"Bearer {gateway.key}"})
        assert answer.status_code == 401


async def test_only_owners_manage_administrators_and_the_last_stays(gateway: Any) -> None:
    async with client_of(gateway) as client:
        own = (await client.get("/whoami")).json()
        assert own["role"] == "owner"
        problem(await client.delete(f"/admin-keys/{own['key_id']}"), 409, "last owner")
        admin = await made(client, "/admin-keys", name="ops", role="admin")
        async with client_of(gateway, admin["secret"]) as other:
            assert (await other.get("/whoami")).json()["role"] == "admin"
            told = await other.post("/admin-keys", json={"name": "mine", "role": "owner"})
            problem(told, 403, "'admin'", "'owner'")
            assert (await other.post("/tenants", json={"name": "theirs"})).status_code == 201
            renewed = (await client.post(f"/admin-keys/{admin['id']}/rotate", json={})).json()
            problem(await other.get("/whoami"), 401)
            other.headers["authorization"] = f"Bearer {renewed['secret']}"
            assert (await other.get("/whoami")).status_code == 200
            await client.delete(f"/admin-keys/{admin['id']}")
            problem(await other.get("/whoami"), 401)
        tenant_key = gateway.key.removeprefix("sk-penstock-").split("-")[0]
        problem(await client.get(f"/admin-keys/{tenant_key}"), 404)


async def test_dead_events_refusals_and_alerts_are_shown(gateway: Any) -> None:
    await gateway.directory.create_tenant(ACTOR, "other")
    async with gateway.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO dead_usage_events (shard, entry_id, raw, error) "
                "SELECT '{s00}', n || '-0', convert_to('no event', 'UTF8'), 'unreadable' FROM generate_series(1, 3) n"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO refusals (bucket, tenant_id, key_id, reason, count) SELECT now() - n * interval '1 day', "
                "id, 'k', reason, n FROM tenants, unnest(ARRAY['budget', 'requests']) reason, generate_series(1, 2) n"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO alerts (id, tenant_id, limit_id, period_start, threshold, spent_nano_usd, "
                'amount_nano_usd, subject, target, "window", crossed_at) SELECT gen_random_uuid(), id, '
                "gen_random_uuid(), now(), 80, 8, 10, 'tenant', '', 'month', now() FROM tenants"
            )
        )
    async with client_of(gateway) as client:
        page = (await client.get("/dead-events", params={"limit": 2})).json()
        assert [event["raw"] for event in page["data"]] == ["no event"] * 2
        (last,) = (await client.get("/dead-events", params={"after": page["next"]})).json()["data"]
        problem(await client.post(f"/dead-events/{last['id']}/retry"), 409, "read")
        assert (await client.delete(f"/dead-events/{last['id']}")).status_code == 204
        problem(await client.get(f"/dead-events/{last['id']}"), 404)
        for strange in ("0", "-1", "x", "9" * 25):
            problem(await client.get(f"/dead-events/{strange}"), 404)
        counts = (await client.get("/refusals")).json()["data"]
        assert sorted((row["tenant"], row["reason"], row["count"]) for row in counts) == [
            (tenant, reason, 3) for tenant in ("acme", "other") for reason in ("budget", "requests")
        ]
        first = (await client.get("/refusals", params={"limit": 3})).json()
        rest = (await client.get("/refusals", params={"after": first["next"]})).json()
        assert first["data"] + rest["data"] == counts
        since = (datetime.now(UTC) - timedelta(hours=36)).isoformat()
        (one, _) = (await client.get("/refusals", params={"tenant": "acme", "start": since})).json()["data"]
        assert one["count"] == 1
        page = (await client.get("/alerts", params={"limit": 1})).json()
        (other,) = (await client.get("/alerts", params={"after": page["next"]})).json()["data"]
        assert {page["data"][0]["tenant_id"], other["tenant_id"]} == {row["tenant_id"] for row in counts}
        assert (other["spent_usd"], other["amount_nano_usd"]) == ("0.000000008", 10)
        assert (await client.get(f"/alerts/{other['id']}")).json() == other
        (mine,) = (await client.get("/alerts", params={"tenant": "acme"})).json()["data"]
        assert mine["tenant_id"] == counts[0]["tenant_id"] or mine["tenant_id"] == counts[2]["tenant_id"]
