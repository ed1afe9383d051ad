"""The Lua scripts of a shard. Those that touch counters begin with what they share, ``common.lua``."""

from __future__ import annotations

from hashlib import sha1
from importlib import resources

from gateway.admission.redis import Script, load_script

_HEAD = b"#!lua\n"


def _with_common(name: str) -> Script:
    here = resources.files("gateway.admission")
    source = _HEAD + here.joinpath("common.lua").read_bytes() + here.joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


ADMIT = _with_common("admit")
SETTLE = _with_common("settle")
EXPIRE = _with_common("expire")
RENEW = _with_common("renew")
RESTORE = _with_common("restore")
REBUILD = _with_common("rebuild")
RECOUNT = _with_common("recount")
SNAPSHOT = _with_common("snapshot")
OPEN = load_script("open")
ANNOUNCE = load_script("announce")
SCRIPTS = (ADMIT, SETTLE, EXPIRE, RENEW, RESTORE, REBUILD, RECOUNT, SNAPSHOT, OPEN, ANNOUNCE)
