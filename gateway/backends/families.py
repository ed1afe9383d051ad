"""How each family of servers is spoken to: one adapter a family, made once for the whole process."""

from __future__ import annotations

from gateway.apis import Family
from gateway.backends.anthropic import Anthropic
from gateway.backends.backend import Backend
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.openai_compatible import OpenAICompatible
from gateway.clock import Clock


def create_backends(worker: FleetWorker, clock: Clock) -> dict[Family, Backend]:
    return {"penstock": worker, "openai": OpenAICompatible(clock), "anthropic": Anthropic(clock)}
