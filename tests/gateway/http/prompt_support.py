"""The doors of the prompt log and the answer cache over real services, without the rest of a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from litestar import Litestar, Router
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.administration.caches import CacheAdministration
from gateway.administration.prompts import PromptAdministration
from gateway.admission.redis import create_redis
from gateway.cache.erasing import CachedAnswers
from gateway.cache.forgetting import RemoteCache
from gateway.clock import SystemClock
from gateway.http.admin.audit import audit_handlers
from gateway.http.admin.cache import cache_handlers
from gateway.http.admin.gate import MAX_BODY_BYTES, gate
from gateway.http.admin.prompts import prompt_handlers
from gateway.http.admin.resource import PREFIX
from gateway.http.errors import EXCEPTION_HANDLERS
from gateway.http.prompts import tenant_prompt_handlers
from gateway.idempotency.erasing import IdempotentAnswers
from gateway.promptlog.eraser import Erasable, Eraser
from gateway.responses.erasing import StoredResponses
from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.service import Tenants
from tests.gateway.promptlog.support import Rig
from tests.gateway.promptlog.support import rig as make_rig
from tests.gateway.tenants.support import ACTOR

SECRET_KEY = SecretKey("secret-key-of-the-tests-of-these-doors")
ADMIN = "/admin/v1"


@dataclass(frozen=True)
class Door:
    """``keys``: of ``acme`` and ``globex`` one that reads prompts; ``acme-inference``, ``acme-usage``; of admins
    ``viewer``, ``admin``, ``owner``."""

    client: httpx.AsyncClient
    rig: Rig
    acme: UUID
    globex: UUID
    keys: dict[str, str]
    directory: Directory
    engine: AsyncEngine

    async def get(self, path: str, caller: str | None = "admin", /, **parameters: Any) -> httpx.Response:
        return await self.client.get(path, params=parameters or None, headers=self._headers(caller))

    async def post(self, path: str, caller: str | None = "admin", /, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body, headers=self._headers(caller))

    def _headers(self, caller: str | None) -> dict[str, str]:
        return {} if caller is None else {"authorization": f"Bearer {self.keys.get(caller, caller)}"}

    async def audited(self) -> list[Any]:
        """Of the log and the cache, oldest first."""
        records = await self.directory.list_audit(limit=1000)
        return [each for each in reversed(records) if each.kind in ("prompt", "answer_cache")]


def end_user_of(tenant_id: UUID, name: str) -> str:
    return end_user_hash(SECRET_KEY, tenant_id, name)


@asynccontextmanager
async def prompt_door(
    url: str, engine: AsyncEngine, *, off: bool = False, others: Sequence[Erasable] = (), cache_url: str | None = None
) -> AsyncIterator[Door]:
    """``off``: without a Redis for them. ``cache_url``: of the answer cache, if it is another's."""
    clock = SystemClock()
    directory = Directory(engine, clock, secret_key=SECRET_KEY)
    tenants = Tenants(engine, clock)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(make_rig(url, engine))
        cache = RemoteCache(cache_url or url, SECRET_KEY, clock)
        stack.push_async_callback(cache.close)
        redis = create_redis(url, timeout_s=5.0)
        stack.push_async_callback(redis.close)
        rooms = (CachedAnswers(cache), IdempotentAnswers(redis), StoredResponses(engine), *others)
        prompts = PromptAdministration(
            engine,
            None if off else rig.reader,
            None if off else Eraser(redis, rig.data_keys, clock, rooms),
            end_user_of,
        )
        caches = CacheAdministration(engine, None if off else cache)
        admin = Router(
            PREFIX,
            route_handlers=[*prompt_handlers(prompts), *cache_handlers(caches), *audit_handlers(directory)],
            guards=[gate(tenants, body_timeout_s=5.0)],
            request_max_body_size=MAX_BODY_BYTES,
        )
        app = Litestar(
            route_handlers=[admin, *tenant_prompt_handlers(tenants, prompts, body_timeout_s=5.0)],
            exception_handlers=EXCEPTION_HANDLERS,
            logging_config=None,
        )
        keys = await _keys(directory)
        ids = [(await directory.tenant(name)).id for name in ("acme", "globex")]
        transport = httpx.ASGITransport(app=app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
        yield Door(client, rig, *ids, keys, directory, engine)


async def _keys(directory: Directory) -> dict[str, str]:
    keys = {}
    for tenant in ("acme", "globex"):
        await directory.create_tenant(ACTOR, tenant)
        keys[tenant], _ = await directory.create_key(ACTOR, tenant, "reads", scopes={"prompts:read"})
    for scope in ("inference", "usage:read"):
        name = f"acme-{scope.partition(':')[0]}"
        keys[name], _ = await directory.create_key(ACTOR, "acme", name, scopes={scope})
    for role in ("viewer", "admin", "owner"):
        keys[role], _ = await directory.create_admin_key(ACTOR, role, role=role)
    return keys
