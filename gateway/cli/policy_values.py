"""Policies as options of the command line: ``--cache mode=semantic --cache ttl_s=600``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)


class GivenPolicy:
    """What the options ask for: each setting's text, or None for the usual."""

    def __init__(self, values: Mapping[str, str | None]) -> None:
        self._values = values

    def applied(self, before: S) -> S:
        """``before`` with what is given. Raises click.BadParameter."""
        merged: dict[str, Any] = msgspec.to_builtins(before)
        for name, text in self._values.items():
            if text is None:
                merged.pop(name, None)
            else:
                merged[name] = _value(text)
        try:
            converted: S = msgspec.convert(merged, type(before), strict=False)
        except msgspec.ValidationError as fault:
            raise click.BadParameter(str(fault)) from fault
        return converted


class _PolicyType(click.ParamType[tuple[str, str | None]]):
    name = "SETTING=VALUE"

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str | None]:
        if isinstance(value, tuple):
            return value
        name, sign, text = str(value).partition("=")
        if not sign or name not in self._kind.__struct_fields__:
            known = ", ".join(self._kind.__struct_fields__)
            self.fail(f"write SETTING=VALUE, where the setting is one of {known}", param, ctx)
        return name, text if text != "default" else None


def policy_option(field: str, kind: type[msgspec.Struct], flag: str, what: str) -> Callable[[F], F]:
    """An option that may be given several times; its value is a GivenPolicy, or None."""
    settings = ", ".join(kind.__struct_fields__)

    def gathered(_context: click.Context, _param: click.Parameter, values: tuple[tuple[str, str | None], ...]) -> Any:
        return GivenPolicy(dict(values)) if values else None

    return click.option(
        flag,
        field,
        multiple=True,
        type=_PolicyType(kind),
        callback=gathered,
        metavar="SETTING=VALUE",
        help=f"{what}: {settings}. `SETTING=default` for the usual; may be given several times.",
    )


def policy_text(policy: msgspec.Struct) -> str:
    """What differs from the usual, as the options have it; ``-`` for nothing."""
    given: dict[str, Any] = msgspec.to_builtins(policy)
    return " ".join(f"{name}={_text(value)}" for name, value in given.items()) or "-"


def _value(text: str) -> Any:
    """JSON where it is JSON, as for lists; else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
