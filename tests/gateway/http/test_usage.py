from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from tests.gateway.tenants.support import ACTOR

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/admin/v1/usage"


async def whole(c: Any) -> None:
    await c.whole()


async def test_the_report_shows_requests_tokens_and_cost(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(whole))
    await gateway.directory.create_tenant(ACTOR, "quiet")
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for _ in range(3):
            await client.post("/v1/chat/completions", json=ASK, headers={"authorization": f"Bearer {gateway.key}"})
        await gateway.rows(3)
        client.headers["authorization"] = f"Bearer {gateway.admin_key}"
        answer = await client.get(PATH, params={"tenant": "acme"})
        assert answer.status_code == 200
        (row,) = answer.json()["data"]
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (3, 27, 9)
        assert row["requests_by_status"]["ok"] == 3
        assert (row["charged_nano_usd"], row["charged_usd"]) == (45_000, "0.000045000")
        assert (await client.get(PATH, params={"tenant": "quiet"})).json()["data"] == []
        grouped = await client.get(PATH, params={"group_by": ["tenant", "status"]})
        (row,) = grouped.json()["data"]
        assert (row["tenant"], row["status"]) == ("acme", "ok")
        now = datetime.now(UTC)
        for start, end, count in ((now - timedelta(hours=1), now + timedelta(hours=1), 1), (now, None, 0)):
            params = {"start": start.isoformat()} | ({"end": end.isoformat()} if end else {})
            assert len((await client.get(PATH, params=params)).json()["data"]) == count


async def test_what_cannot_be_reported_is_a_problem(gateway: Any) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for key in (None, "nonsense", gateway.key):
            answer = await client.get(PATH, headers={} if key is None else {"authorization": f"Bearer {key}"})
            assert answer.status_code == 401
            assert answer.headers["content-type"] == "application/problem+json"
        client.headers["authorization"] = f"Bearer {gateway.admin_key}"
        cases: list[tuple[dict[str, str], int, str]] = [
            ({"tenant": "nobody"}, 404, "nobody"),
            ({"tenant": "no\x00body"}, 400, "tenant"),
            ({"start": "yesterday"}, 400, "start"),
            ({"start": "2026-01-01T00:00:00"}, 400, "time zone"),
            ({"start": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z"}, 400, "before"),
            ({"group_by": "planet"}, 400, "group_by"),
            ({"timezone": "Mars/Olympus"}, 400, "time zone"),
            ({"tenent": "acme"}, 400, "tenent"),
            ({"limit": "0"}, 400, "limit"),
            ({"limit": "9" * 30}, 400, "limit"),
            ({"order_by": "-beauty"}, 400, "order_by"),
            ({"order_by": "day"}, 400, "order_by"),
            ({"cursor": "x"}, 400, "cursor"),
            ({"format": "xml"}, 400, "format"),
            ({"status": "fine"}, 400, "status"),
            ({"month": "2026-13"}, 400, "month"),
            ({"month": "2026-1"}, 400, "month"),
            ({"month": "9999-01"}, 400, "month"),
            ({"day": "today"}, 400, "day"),
            ({"hour": "2026-01-01T00:00:00"}, 400, "hour"),
            ({"project": "nothing"}, 404, "nothing"),
            ({"key": "nokey"}, 404, "nokey"),
            ({"end_user": "alice"}, 400, "end_user"),
            ({"model": "m\x00"}, 400, "model"),
            ({"tag": "x" * 2000}, 400, "tag"),
            ({"project": "p\x00"}, 400, "project"),
        ]
        for params, status, word in cases:
            answer = await client.get(PATH, params=params)
            assert answer.status_code == status, (params, answer.text)
            problem = answer.json()
            assert problem["status"] == status
            assert word in problem["detail"], problem
        answer = await client.get("/admin/v1/nothing")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
