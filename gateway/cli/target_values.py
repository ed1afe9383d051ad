"""A route's target on the command line: ``POOL[:model=M][,weight=W][,priority=P]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from gateway.routing.route import Target


@dataclass(frozen=True, slots=True)
class GivenTarget:
    pool: str
    model: str | None = None
    """None: as the route."""
    weight: float = 1.0
    priority: int = 0

    def named(self, route: str) -> Target:
        return Target(self.pool, route if self.model is None else self.model, self.weight, self.priority)


class TargetType(click.ParamType[GivenTarget]):
    """Names may hold colons, so the pool's ends at ``:model=`` or at the first comma."""

    name = "POOL[:model=M][,weight=W][,priority=P]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> GivenTarget:
        if isinstance(value, GivenTarget):
            return value
        pool, *options = str(value).split(",")
        pool, separator, model = pool.partition(":model=")
        given: dict[str, Any] = {"model": model} if separator else {}
        for option in options:
            name, _, text = option.partition("=")
            if name in given or name not in ("model", "weight", "priority"):
                self.fail(f"{option!r} is none of model=M, weight=W and priority=P, each once", param, ctx)
            try:
                given[name] = {"model": str, "weight": float, "priority": int}[name](text)
            except ValueError:
                self.fail(f"{text!r} is no number, as the {name} of a target is", param, ctx)
        if "=" in pool:
            self.fail(f"{value!r} has a colon where a comma belongs; write {self.name}", param, ctx)
        if not pool or given.get("model") == "":
            self.fail(f"{value!r} names no {'model' if pool else 'pool'}; write {self.name}", param, ctx)
        return GivenTarget(pool, **given)


def target_text(target: Target) -> str:
    """As ``TargetType`` reads it."""
    text = f"{target.pool}:model={target.backend_model}"
    text += f",weight={target.weight:g}" if target.weight != 1 else ""
    return text + (f",priority={target.priority}" if target.priority else "")
