"""Images and files of a chat completion as sources of Anthropic's Messages API.

References: https://platform.claude.com/docs/en/build-with-claude/vision,
https://platform.claude.com/docs/en/build-with-claude/pdf-support
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec

from gateway.translation.chat_fields import NULL, TEXT, read
from worker.protocol.errors import ApiError, bad_request

IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
PDF: Final = "application/pdf"


class _ImageUrl(msgspec.Struct):
    url: msgspec.Raw = NULL


class _File(msgspec.Struct):
    file_data: msgspec.Raw = NULL
    filename: str | None = None


_IMAGE_URL = msgspec.json.Decoder(_ImageUrl)
_FILE = msgspec.json.Decoder(_File)


def image(image_url: msgspec.Raw, where: str) -> dict[str, Any]:
    """Its source. Raises ApiError (400)."""
    as_text = bytes(image_url).startswith(b'"')
    url = image_url if as_text else read(image_url, _IMAGE_URL, where).url
    inside = _inside(url, where)
    if inside.startswith((b"https://", b"http://")):
        return {"type": "url", "url": url}
    media_type, data = _of_data_url(inside)
    media_type = "image/jpeg" if media_type == "image/jpg" else media_type
    if media_type not in IMAGES or data is None:
        raise bad_request(
            f"'{where}' must have an https URL, or a data URL in base64 of a JPEG, PNG, GIF or WebP image.", param=where
        )
    return {"type": "base64", "media_type": media_type, "data": _quoted(data)}


def document(file: msgspec.Raw, where: str) -> dict[str, Any]:
    """The block of a file: a PDF, or plain text. Raises ApiError (400)."""
    given = read(file, _FILE, where) if file != NULL else _File()
    inside = _inside(given.file_data, f"{where}.file_data")
    data: bytes | None
    if inside.startswith(b"data:"):
        media_type, data = _of_data_url(inside)
    else:
        media_type, data = PDF, inside
    block: dict[str, Any] = {"type": "document"}
    if media_type == PDF and data:
        block["source"] = {"type": "base64", "media_type": PDF, "data": _quoted(data)}
    elif media_type == "text/plain" and data is not None:
        block["source"] = {"type": "text", "media_type": "text/plain", "data": _text(data, where)}
    else:
        raise _not_a_document(where)
    if given.filename:
        block["title"] = given.filename
    return block


def _inside(text: msgspec.Raw, where: str) -> bytes:
    """What stands between the quotation marks; megabytes, that need not become a string and JSON again."""
    raw = bytes(text)
    if raw == b"null" or b"\\" in raw:
        raw = msgspec.json.encode(read(text, TEXT, where))
    elif not raw.startswith(b'"'):
        raise bad_request(f"'{where}' must be text.", param=where)
    return raw[1:-1]


def _quoted(inside: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'"%b"' % inside)


def _of_data_url(url: bytes) -> tuple[str, bytes | None]:
    """Media type and base64; no data where it is none of that."""
    head, comma, data = url.partition(b",")
    media_type, *parameters = head[:200].removeprefix(b"data:").split(b";")
    in_base64 = head.startswith(b"data:") and comma and parameters and parameters[-1] == b"base64"
    return media_type.decode(errors="replace").lower(), data if in_base64 else None


def _text(data: bytes, where: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise _not_a_document(where) from None


def _not_a_document(where: str) -> ApiError:
    return bad_request(
        f"'{where}.file_data' must be a data URL in base64 of a PDF, or of plain text in UTF-8.",
        param=f"{where}.file_data",
    )
