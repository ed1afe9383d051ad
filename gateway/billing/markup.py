"""HTML built by functions: whatever is not Markup already is escaped, so nothing can forget to."""

from __future__ import annotations

from html import escape

Attribute = str | int


class Markup(str):
    """Text that is HTML already, made by ``element`` or written in the source. Never a value from elsewhere."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: Attribute) -> Markup:
    """``<name attribute="value">children</name>``. ``class_`` stands for ``class``, other ``_`` for ``-``."""
    given = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else escape(child, quote=True) for child in children))
