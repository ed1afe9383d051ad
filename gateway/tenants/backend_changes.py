"""Declared backends: created, changed, deleted. Their secrets are sealed before they are written, and shown nowhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET
from sqlalchemy import Row, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db.engine import transaction
from gateway.db.tables import backends
from gateway.routing.backend_secrets import (
    origin_of,
    seal_api_key,
    seal_headers,
    unseal_api_key,
    unseal_headers,
)
from gateway.routing.declared import Brand, Unusable, endpoint_of
from gateway.routing.route import Endpoint
from gateway.secret_key import SealBroken, SecretKey
from gateway.tenants.audit import Actor, audit
from gateway.tenants.backend_specs import (
    PLAIN_FIELDS,
    BackendChange,
    BackendExists,
    BackendRecord,
    BackendSpec,
    UnknownBackend,
    check_backend,
    needs_secret_key,
)
from gateway.tenants.catalog import check_pool
from gateway.tenants.changes import check_version
from gateway.tenants.records import InvalidField, StateConflict, is_name
from gateway.tenants.specs import check_page

Changed = Callable[[], Awaitable[None]]


class BackendChanges:
    """Every change raises ConfigurationError or one of its kinds, NotAllowed, DatabaseUnavailable.

    ``brands``: those that can be declared, by name. ``secret_key``: without it nothing secret can be set.
    ``changed``: told after each change.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        secret_key: SecretKey | None,
        brands: Mapping[str, Brand],
        *,
        changed: Changed | None = None,
    ) -> None:
        self._engine = engine
        self._secret_key = secret_key
        self._brands = brands
        self._changed = changed

    async def backend(self, name: str) -> BackendRecord:
        """Raises UnknownBackend, DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            return _record(await _stored(connection, name))

    async def list_backends(
        self, *, pool: str | None = None, after: str | None = None, limit: int = 100
    ) -> list[BackendRecord]:
        """By name, those behind ``after``. Raises ConfigurationError, DatabaseUnavailable."""
        query = select(backends).order_by(backends.c.name).limit(check_page(limit, after))
        if after is not None:
            query = query.where(backends.c.name > after)
        if pool is not None:
            query = query.where(backends.c.pool == (pool if is_name(pool) else ""))
        async with transaction(self._engine) as connection:
            return [_record(row) for row in await connection.execute(query)]

    async def endpoint(self, name: str) -> Endpoint:
        """With its secrets in place, enabled or not. Raises UnknownBackend, StateConflict."""
        async with transaction(self._engine) as connection:
            row = await _stored(connection, name)
        try:
            return endpoint_of(row, self._key(), self._brands)
        except Unusable as fault:
            raise StateConflict(f"the backend {name!r} cannot be used: {fault}") from fault

    async def unreadable(self) -> list[str]:
        """Names of those whose secrets this secret key does not unseal. Raises ConfigurationError without one."""
        query = select(backends).where(backends.c.brand.in_(self._brands)).order_by(backends.c.name)
        async with transaction(self._engine) as connection:
            rows = list(await connection.execute(query))
        return [row.name for row in rows if not self._unseals(row)]

    async def create_backend(self, actor: Actor, spec: BackendSpec) -> BackendRecord:
        """Raises BackendExists, UnknownPool."""
        actor.check_may_change()
        spec = check_backend(spec, self._brands)
        values = {field: getattr(spec, field) for field in ("name", *PLAIN_FIELDS)} | self._sealed(spec)
        async with transaction(self._engine) as connection:
            await check_pool(connection, spec.pool)
            query = insert(backends).values(values).on_conflict_do_nothing().returning(backends)
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise BackendExists(spec.name)
            record = _record(row)
            await audit(connection, actor, "create", "backend", spec.name, after=_audited(record))
        await self._tell()
        return record

    async def update_backend(
        self, actor: Actor, name: str, change: BackendChange, *, if_version: int | None = None
    ) -> BackendRecord:
        """A key or headers go to another host only if they are given anew.

        Raises UnknownBackend, UnknownPool, VersionConflict.
        """
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            row = await _stored(connection, name, lock=True)
            before = _record(row)
            check_version("backend", name, if_version, before.version)
            spec = check_backend(self._merged(row, change), self._brands)
            wanted = {field: getattr(spec, field) for field in PLAIN_FIELDS}
            plain = {field: value for field, value in wanted.items() if value != row._mapping[field]}
            secret = self._changed_secrets(row, change, spec)
            if not plain and not secret:
                return before
            if "pool" in plain:
                await check_pool(connection, spec.pool)
            query = (
                update(backends)
                .where(backends.c.name == name)
                .values(plain | secret | {"version": before.version + 1})
                .returning(backends)
            )
            after = _record((await connection.execute(query)).one())
            was, now = _audited(before), _audited(after)
            differing = [field for field, value in now.items() if value != was[field]]
            told = {field: now[field] for field in differing}
            was = {field: was[field] for field in differing}
            for field in ("api_key", "headers"):
                if field in secret:
                    was[field] = None if row._mapping[field] is None else "set"
                    told[field] = None if secret[field] is None else "changed"
            await audit(connection, actor, "update", "backend", name, before=was, after=told)
        await self._tell()
        return after

    async def delete_backend(self, actor: Actor, name: str, *, if_version: int | None = None) -> None:
        """Raises UnknownBackend, VersionConflict."""
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            before = _record(await _stored(connection, name, lock=True))
            check_version("backend", name, if_version, before.version)
            await connection.execute(delete(backends).where(backends.c.name == name))
            await audit(connection, actor, "delete", "backend", name, before=_audited(before))
        await self._tell()

    def checked(self, spec: BackendSpec) -> BackendSpec:
        """``spec`` in its normal form, if it can be. Raises ConfigurationError."""
        return check_backend(spec, self._brands)

    async def has_secrets(self, name: str, change: BackendChange) -> bool:
        """Whether the key and headers of ``change`` are those that the backend has. Raises UnknownBackend."""
        async with transaction(self._engine) as connection:
            row = await _stored(connection, name)
        return self._same_api_key(row, change.api_key) and self._same_headers(row, change.headers)

    def _merged(self, row: Row[Any], change: BackendChange) -> BackendSpec:
        """Of the secrets only what is given."""
        given = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not UNSET}
        return BackendSpec(name=row.name, **({field: row._mapping[field] for field in PLAIN_FIELDS} | given))

    def _changed_secrets(self, row: Row[Any], change: BackendChange, spec: BackendSpec) -> dict[str, Any]:
        """Columns of the secrets that are others now."""
        moved = origin_of(spec.base_url) != origin_of(row.base_url)
        if moved:
            for field, has, given in (
                ("api_key", row.api_key is not None, change.api_key),
                ("headers", row.headers is not None, change.headers),
            ):
                if has and given is UNSET:
                    raise InvalidField(
                        field,
                        "with another host the secrets must be given anew, or taken away: what was meant for "
                        f"{origin_of(row.base_url)} is not sent elsewhere",
                    )
        has_key = row.api_key is not None if change.api_key is UNSET else change.api_key is not None
        names = row.header_names if change.headers is UNSET else spec.headers
        if has_key and (twice := set(names) & self._brands[spec.brand].key_headers("k").keys()):
            raise InvalidField(
                "headers", f"{', '.join(twice)} would be there twice: the API key is sent so; give the headers without"
            )
        sealed = self._sealed(spec)
        if change.api_key is UNSET or (not moved and self._same_api_key(row, change.api_key)):
            del sealed["api_key"]
        if change.headers is UNSET or (not moved and self._same_headers(row, change.headers)):
            del sealed["headers"], sealed["header_names"]
        return sealed

    def _sealed(self, spec: BackendSpec) -> dict[str, Any]:
        """Columns of the secrets."""
        place = spec.name, spec.base_url
        return {
            "api_key": None if spec.api_key is None else seal_api_key(self._key(), *place, spec.api_key),
            "headers": seal_headers(self._key(), *place, spec.headers) if spec.headers else None,
            "header_names": list(spec.headers),
        }

    def _unseals(self, row: Row[Any]) -> bool:
        try:
            endpoint_of(row, self._key(), self._brands)
        except Unusable:
            return False
        return True

    def _same_api_key(self, row: Row[Any], given: object) -> bool:
        if given is UNSET:
            return True
        if given is None or row.api_key is None:
            return given is row.api_key
        try:
            return unseal_api_key(self._key(), row.name, row.base_url, row.api_key) == given
        except SealBroken:
            return False

    def _same_headers(self, row: Row[Any], given: object) -> bool:
        if given is UNSET:
            return True
        if not isinstance(given, dict) or not given or row.headers is None:
            return not given and row.headers is None
        try:
            stored = unseal_headers(self._key(), row.name, row.base_url, row.headers)
        except SealBroken:
            return False
        return stored == {name.lower(): value for name, value in given.items()}

    def _key(self) -> SecretKey:
        if self._secret_key is None:
            raise needs_secret_key()
        return self._secret_key

    async def _tell(self) -> None:
        if self._changed is not None:
            await self._changed()


async def _stored(connection: AsyncConnection, name: str, *, lock: bool = False) -> Row[Any]:
    query = select(backends).where(backends.c.name == name)
    row = None
    if is_name(name):
        row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    if row is None:
        raise UnknownBackend(name)
    return row


def _record(row: Row[Any]) -> BackendRecord:
    return BackendRecord(
        **{field: row._mapping[field] for field in ("name", *PLAIN_FIELDS, "version", "created_at")},
        has_api_key=row.api_key is not None,
        header_names=tuple(row.header_names),
    )


def _audited(record: BackendRecord) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(record)
    del values["created_at"]
    return values
