"""The deployment's master keys: one that wraps the data keys, and former ones that open what is not wrapped anew."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from gateway.secret_key import SecretKey

_PURPOSE: Final = "data key"
_ID_LENGTH: Final = 16


class UnknownMasterKey(Exception):
    """A data key is there and cannot be opened. The message says what to set."""


class MasterKeys:
    """``current`` wraps; each of ``former`` opens what it wrapped."""

    def __init__(self, current: SecretKey, *former: SecretKey) -> None:
        self._known = {_id_of(key): key for key in (*reversed(former), current)}
        self.current_id = _id_of(current)

    @classmethod
    def configured(cls, secret_key: str, master_key: str | None, previous_master_key: str | None) -> MasterKeys:
        """As the settings have them. The one made of ``secret_key`` wraps while there is no ``master_key``, and opens
        what it wrapped before one was set.
        """
        made = SecretKey(SecretKey(secret_key).keyed_hash("master key"))
        former = [made] if previous_master_key is None else [SecretKey(previous_master_key), made]
        return cls(made if master_key is None else SecretKey(master_key), *former)

    @property
    def former_ids(self) -> list[str]:
        return [id for id in self._known if id != self.current_id]

    def wrap(self, secret: bytes, tenant_id: UUID, end_user: str, key_id: UUID) -> bytes:
        """By the current one."""
        context = _context(tenant_id, end_user, key_id)
        return self._known[self.current_id].seal(_PURPOSE, secret, context=context)

    def unwrap(self, wrapped: bytes, master_id: str, tenant_id: UUID, end_user: str, key_id: UUID) -> bytes:
        """Raises UnknownMasterKey, and SealBroken for a row that was changed or moved."""
        master = self._known.get(master_id)
        if master is None:
            raise UnknownMasterKey(
                f"data key {key_id} was wrapped by master key {master_id}, which is not set here; set it as "
                "PENSTOCK_PREVIOUS_MASTER_KEY and run `penstock prompts rewrap`"
            )
        return master.unseal(_PURPOSE, wrapped, context=_context(tenant_id, end_user, key_id))


def _id_of(key: SecretKey) -> str:
    return key.keyed_hash("master key id")[:_ID_LENGTH]


def _context(tenant_id: UUID, end_user: str, key_id: UUID) -> bytes:
    return tenant_id.bytes + key_id.bytes + end_user.encode()
