"""Policies as Postgres has them, which may be those of a later release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import structlog

from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy

P = TypeVar("P", CachePolicy, PromptLogPolicy)
_log = structlog.get_logger(__name__)


def read_policy(stored: Mapping[str, Any], kind: type[P]) -> P:
    """Settings that this release does not know are left out. With a value that it does not know all is as usual, which
    is off: nothing is kept or logged by a policy that is half understood."""
    known = {name: value for name, value in stored.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as fault:
        _log.warning("policy_not_read", kind=kind.__name__, error=str(fault))
        return kind()
