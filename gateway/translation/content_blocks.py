"""Content blocks of Messages as the parts of a chat's message, their texts and data as the JSON they came as.

Reference: https://docs.claude.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

WRAPPED: Final = "INVALID_JSON"
"""Anthropic's name for the only field of an input that wraps what a model wrote instead of a JSON object:
https://docs.claude.com/en/docs/agents-and-tools/tool-use/fine-grained-tool-streaming"""
_NULL = msgspec.Raw(b"null")


class NotAChat(Exception):
    """A request cannot be told as a chat completion; the message says why, as a clause that follows "it"."""


class Source(msgspec.Struct):
    """Where an image or a document comes from."""

    type: str
    media_type: msgspec.Raw = _NULL
    data: msgspec.Raw = _NULL
    url: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL


class Block(msgspec.Struct):
    type: str
    text: msgspec.Raw = _NULL
    source: Source | str | None = None
    title: msgspec.Raw = _NULL
    context: msgspec.Raw = _NULL
    id: msgspec.Raw = _NULL
    name: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    tool_use_id: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL
    is_error: bool | None = None


_blocks_decoder = msgspec.json.Decoder(list[Block])


def is_text(raw: msgspec.Raw) -> bool:
    return bytes(raw).startswith(b'"')


def is_object(raw: msgspec.Raw) -> bool:
    return bytes(raw).startswith(b"{")


def blocks_of(raw: msgspec.Raw, where: str) -> list[Block]:
    """Raises NotAChat."""
    try:
        return _blocks_decoder.decode(raw)
    except msgspec.DecodeError as fault:
        raise NotAChat(f"has content in '{where}' that is neither text nor a list of known blocks: {fault}") from None


def content_of(raw: msgspec.Raw, where: str) -> Any:
    """Text, or a list of blocks that are all text. Raises NotAChat."""
    if is_text(raw):
        return raw
    parts = list(parts_of(blocks_of(raw, where), where))
    if any(part["type"] != "text" for part in parts):
        raise NotAChat(f"has more than text in '{where}'")
    return parts[0]["text"] if len(parts) == 1 else parts


def parts_of(blocks: Iterable[Block], where: str) -> Iterator[dict[str, Any]]:
    """Empty texts are left out. Raises NotAChat."""
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        if block.type == "text":
            if not is_text(block.text):
                raise NotAChat(f"has no 'text' in '{here}'")
            if bytes(block.text) != b'""':
                yield {"type": "text", "text": block.text}
        elif block.type == "image":
            yield _image(block, here)
        elif block.type == "document":
            yield from _document(block, here)
        elif block.type == "search_result":
            yield from _search_result(block, here)
        else:
            raise NotAChat(f"has a block of type {block.type[:64]!r} in '{here}', which no chat completion knows")


def text_of(*texts: msgspec.Raw | bytes) -> msgspec.Raw:
    """JSON texts, put together."""
    return msgspec.Raw(b'"' + b"".join([bytes(text)[1:-1] for text in texts]) + b'"')


def _image(block: Block, where: str) -> dict[str, Any]:
    source = block.source
    if isinstance(source, Source) and source.type == "url" and is_text(source.url):
        return {"type": "image_url", "image_url": {"url": source.url}}
    if isinstance(source, Source) and source.type == "base64" and is_text(source.data) and is_text(source.media_type):
        return {"type": "image_url", "image_url": {"url": _data_url(source)}}
    raise NotAChat(f"has an image in '{where}' that comes neither by 'base64' nor by 'url'")


def _document(block: Block, where: str) -> Iterator[dict[str, Any]]:
    source = block.source
    heads = [text for text in (block.title, block.context) if is_text(text)]
    if isinstance(source, Source):
        if source.type == "text" and is_text(source.data):
            yield {"type": "text", "text": _paragraphs(*heads, source.data)}
            return
        if source.type == "content":
            if heads:
                yield {"type": "text", "text": _paragraphs(*heads)}
            if is_text(source.content):
                yield {"type": "text", "text": source.content}
            else:
                yield from parts_of(blocks_of(source.content, f"{where}.source.content"), f"{where}.source.content")
            return
        if source.type == "base64" and is_text(source.data) and is_text(source.media_type):
            if is_text(block.context):
                yield {"type": "text", "text": block.context}
            name = block.title if is_text(block.title) else msgspec.Raw(b'"document.pdf"')
            yield {"type": "file", "file": {"filename": name, "file_data": _data_url(source)}}
            return
    raise NotAChat(f"has a document in '{where}' that comes neither as text nor by 'base64'")


def _search_result(block: Block, where: str) -> Iterator[dict[str, Any]]:
    heads = [block.title] if is_text(block.title) else []
    if isinstance(block.source, str):
        heads.append(msgspec.Raw(msgspec.json.encode(block.source)))
    if heads:
        yield {"type": "text", "text": _paragraphs(*heads)}
    yield from parts_of(blocks_of(block.content, f"{where}.content"), f"{where}.content")


def _data_url(source: Source) -> msgspec.Raw:
    return text_of(b'"data:"', source.media_type, b'";base64,"', source.data)


def _paragraphs(*texts: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(b'"' + b"\\n\\n".join([bytes(text)[1:-1] for text in texts]) + b'"')
