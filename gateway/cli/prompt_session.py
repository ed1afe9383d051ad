"""What the commands of the prompt log and the answer cache share: the rooms opened, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import click
import structlog

from gateway.administration.caches import CacheAdministration
from gateway.administration.prompts import PromptAdministration
from gateway.admission.redis import RedisClient, RedisUnavailable, create_redis
from gateway.cache.erasing import CachedAnswers
from gateway.cache.forgetting import RemoteCache
from gateway.cli.session import Session, run
from gateway.datakeys.master_keys import MasterKeys, UnknownMasterKey
from gateway.datakeys.service import DataKeys
from gateway.idempotency.erasing import IdempotentAnswers
from gateway.promptlog.entry import NotReplayable
from gateway.promptlog.eraser import Eraser
from gateway.promptlog.reader import Reader
from gateway.redis_url import NoCacheRedis, cache_url
from gateway.responses.erasing import StoredResponses
from gateway.secret_key import SecretKey
from gateway.settings import SettingsError, load_settings
from gateway.tenants.audit import Actor
from gateway.tenants.end_users import end_user_hash

TIMEOUT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rooms:
    prompts: PromptAdministration
    caches: CacheAdministration
    data_keys: DataKeys
    actor: Actor


@asynccontextmanager
async def open_rooms(session: Session) -> AsyncIterator[Rooms]:
    """Raises SettingsError."""
    settings = load_settings()
    if settings.secret_key is None:
        raise SettingsError("PENSTOCK_SECRET_KEY is not set; give this command the one that the gateways have")
    secret_key = SecretKey(settings.secret_key)
    masters = MasterKeys.configured(settings.secret_key, settings.master_key, settings.previous_master_key)
    engine, clock = session.engine, session.clock
    url = cache_url(settings.cache_redis_url, settings.redis_url)
    async with AsyncExitStack() as stack:
        data_keys = await stack.enter_async_context(DataKeys(engine, masters, clock))

        def client(of: str) -> RedisClient:
            made = create_redis(of, timeout_s=TIMEOUT_S, name="penstock-console")
            stack.push_async_callback(made.close)
            return made

        reader: Reader | None = None
        eraser: Eraser | None = None
        cache: RemoteCache | None = None
        if url is not None:
            cache = RemoteCache(url, secret_key, clock)
            stack.push_async_callback(cache.close)
            reader = Reader(client(url), data_keys, clock)
            others = (CachedAnswers(cache), IdempotentAnswers(client(settings.redis_url)), StoredResponses(engine))
            eraser = Eraser(client(url), data_keys, clock, others)
        prompts = PromptAdministration(
            engine, reader, eraser, lambda tenant_id, given: end_user_hash(secret_key, tenant_id, given)
        )
        yield Rooms(prompts, CacheAdministration(engine, cache), data_keys, session.actor)


def run_in_rooms(work: Callable[[Rooms], Awaitable[T]]) -> T:
    """As ``run``. Raises click.ClickException for what the user can mend."""

    async def inside(session: Session) -> T:
        async with open_rooms(session) as rooms:
            return await work(rooms)

    before = structlog.get_config()
    # What is asked for goes to standard output alone.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        return run(inside)
    except (NoCacheRedis, UnknownMasterKey, NotReplayable) as fault:
        raise click.ClickException(str(fault)) from fault
    except RedisUnavailable as fault:
        raise click.ClickException(
            f"Redis does not answer. Is it running, and are CACHE_REDIS_URL and REDIS_URL right? ({fault})"
        ) from fault
    finally:
        structlog.configure(**before)
