"""Translators read JSON; what backends send is now and then only nearly so."""

from __future__ import annotations

from gateway.ask import Translator, Untranslatable
from gateway.backends.lenient_json import strict


class Mending:
    """A ``Translator`` that gives what its own one cannot read to it once more, as JSON."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def event(self, data: bytes) -> list[bytes]:
        try:
            return self._translator.event(data)
        except Untranslatable:
            mended = strict(data)
            if mended is None:
                raise
        return self._translator.event(mended)

    def end(self) -> list[bytes]:
        return self._translator.end()

    def whole(self, body: bytes) -> bytes:
        try:
            return self._translator.whole(body)
        except Untranslatable:
            mended = strict(body)
            if mended is None:
                raise
        return self._translator.whole(mended)
