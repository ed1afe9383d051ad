"""What has to be done so that all is as a fleet file says: read first, shown, then done step by step.

Nothing is taken away unless ``prune`` is given, and then only what a list in the file leaves out: a route, a backend, a
pool, or a project, key or limit of a tenant that the file names. Tenants and prices are never taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from msgspec import UNSET

from gateway.billing.price_spec import RATES, PriceSpec
from gateway.billing.prices import Price, PriceBook
from gateway.clock import Clock
from gateway.routing.route import Route, new_route
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.catalog import Catalog, RouteChange, check_route
from gateway.tenants.directory import Directory
from gateway.tenants.fleet_backends import plan_backends
from gateway.tenants.fleet_file import FleetFile, PriceEntry, RouteEntry, TenantEntry
from gateway.tenants.fleet_steps import Step, TellSecret, all_pages, at, differences, shown
from gateway.tenants.fleet_tenants import TenantPlanner
from gateway.tenants.records import ConfigurationError, StateConflict, TenantRecord, check_name
from gateway.tenants.specs import MAX_PAGE


@dataclass(slots=True)
class FleetPlanner:
    directory: Directory
    catalog: Catalog
    backends: BackendChanges
    prices: PriceBook
    clock: Clock
    actor: Actor
    secret_key: SecretKey | None
    tell_secret: TellSecret
    environ: Mapping[str, str]
    """Where backends' secrets are read."""
    prune: bool = False
    _removals: list[Step] = field(default_factory=list, init=False)

    async def plan(self, fleet: FleetFile) -> list[Step]:
        """The steps in the order in which they have to be made; none, if all is as it should be.

        A step that somebody else's change overtook raises VersionConflict when it is made. Raises ConfigurationError,
        DatabaseUnavailable.
        """
        self._removals = []
        routes = {route.name: route for route in await all_pages(self._routes_page, lambda route: route.name)}
        tenants = {tenant.name: tenant for tenant in await all_pages(self._tenants_page, lambda tenant: tenant.name)}
        steps = await self._pools(fleet)
        if fleet.backends is not UNSET:
            made, removed = await plan_backends(self.backends, self.actor, fleet.backends, self.environ)
            steps += made
            self._removals = removed + self._removals
        steps += self._routes(fleet, routes)
        planner = TenantPlanner(self.directory, self.clock, self.actor, self.secret_key, self.tell_secret)
        for entry in fleet.tenants:
            made, removed = await planner.plan(entry, tenants.get(entry.name))
            steps += made
            self._removals = removed + self._removals
        for price in fleet.prices:
            _check_known("route", price.route, routes, fleet.routes or ())
            if price.tenant is not None:
                _check_known("tenant", price.tenant, tenants, fleet.tenants)
            steps += await self._price(price, routes, tenants)
        return steps + (self._removals if self.prune else [])

    async def _routes_page(self, after: str | None) -> list[Route]:
        return await self.catalog.list_routes(after=after, limit=MAX_PAGE)

    async def _tenants_page(self, after: str | None) -> list[TenantRecord]:
        return await self.directory.list_tenants(after=after, limit=MAX_PAGE, archived=True)

    async def _pools(self, fleet: FleetFile) -> list[Step]:
        if fleet.pools is UNSET:
            return []
        known = await self.catalog.pools()
        self._removals += [
            Step("-", f"pool {name}", lambda name=name: self.catalog.delete_pool(self.actor, name))  # type: ignore[misc]
            for name in known
            if name not in fleet.pools
        ]
        return [
            Step("+", f"pool {name}", lambda name=name: self.catalog.create_pool(self.actor, check_name("pool", name)))  # type: ignore[misc]
            for name in fleet.pools
            if name not in known
        ]

    def _routes(self, fleet: FleetFile, routes: Mapping[str, Route]) -> list[Step]:
        if fleet.routes is UNSET:
            return []
        steps = [step for entry in fleet.routes if (step := self._route(entry, routes.get(entry.name)))]
        named = {entry.name for entry in fleet.routes}
        gone = [route for name, route in routes.items() if name not in named]
        self._removals = [self._route_removal(route) for route in gone] + self._removals
        return steps

    def _route(self, entry: RouteEntry, old: Route | None) -> Step | None:
        values = entry.values()
        if old is None:
            new = at(f"route {entry.name!r}", lambda: check_route(new_route(**values)))
            details = [f"{name} = {shown(getattr(new, name))}" for name in RouteChange.__struct_fields__]
            return Step("+", f"route {new.name}", lambda: self.catalog.create_route(self.actor, new), tuple(details))
        changed = {name: value for name, value in values.items() if value != getattr(old, name)}
        if not changed:
            return None
        at(f"route {entry.name!r}, of which the rest stays as it is", lambda: check_route(replace(old, **changed)))
        return Step(
            "~",
            f"route {old.name}",
            lambda: self.catalog.update_route(self.actor, old.name, RouteChange(**changed), if_version=old.version),
            differences(old, changed),
        )

    def _route_removal(self, route: Route) -> Step:
        return Step(
            "-",
            f"route {route.name}",
            lambda: self.catalog.delete_route(self.actor, route.name, if_version=route.version),
        )

    async def _price(
        self, entry: PriceEntry, routes: Mapping[str, Route], tenants: Mapping[str, TenantRecord]
    ) -> list[Step]:
        spec = entry.spec()
        tenant = None if entry.tenant is None else tenants.get(entry.tenant)
        versions: Sequence[Price] = ()
        if entry.route in routes and (entry.tenant is None or tenant is not None):
            found = await self.prices.prices(entry.route, tenant=entry.tenant, basis=entry.basis)
            owner = tenant.id if tenant else None
            versions = [price for price in found if price.tenant_id == owner and not price.withdrawn]
        name = " ".join(filter(None, (entry.route, entry.tenant, entry.basis if entry.basis != "charge" else None)))
        old = self._standing(versions, spec.effective_from)
        given = {rate: getattr(spec, rate) for rate in (*RATES, "compute_ceiling_s")}
        if old is None:
            details = tuple(f"{rate} = {shown(value)}" for rate, value in given.items() if value is not None)
        elif changed := {rate: value for rate, value in given.items() if value != getattr(old, rate)}:
            if spec.effective_from is not None:
                raise StateConflict(
                    f"the price of {name} from {spec.effective_from.isoformat()} on is set, and no price ever changes; "
                    "let the other one begin at another time"
                )
            details = differences(old, changed)
        else:
            return []
        return [Step("+" if old is None else "~", f"price {name}", lambda: self._set(spec), details)]

    def _standing(self, versions: Sequence[Price], begin: datetime | None) -> Price | None:
        """The version that begins at ``begin`` or, if that is None, the one in force."""
        if begin is not None:
            return next((price for price in versions if price.effective_from == begin), None)
        now = self.clock.now()
        begun = [price for price in versions if price.effective_from <= now]
        latest = max(begun, key=lambda price: price.effective_from, default=None)
        ended = latest is not None and latest.effective_until is not None and latest.effective_until <= now
        return None if ended else latest

    async def _set(self, spec: PriceSpec) -> None:
        await self.prices.set_price(self.actor, spec)


def _check_known(
    kind: str, name: str, known: Mapping[str, object], entries: Sequence[RouteEntry] | Sequence[TenantEntry]
) -> None:
    if name not in known and all(entry.name != name for entry in entries):
        raise ConfigurationError(f"a price names the {kind} {name!r}, which is neither there nor in the file")
