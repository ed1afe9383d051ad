"""Personal data and secrets blacked out of texts and JSON, before they are written anywhere. Pure functions.

``spans.py`` says how finders look. The built-in ones are ``contacts.py``, ``payment.py``, ``national_ids.py``,
``secrets.py`` and ``media.py``; ``custom.py`` is for a tenant's own patterns. ``redactor.py`` puts placeholders in,
``documents.py`` walks through JSON.
"""

from gateway.redaction.custom import MOST_OF_MATCH, Pattern, compile_patterns
from gateway.redaction.redactor import Redactor, StreamRedactor

__all__ = ["MOST_OF_MATCH", "Pattern", "Redactor", "StreamRedactor", "compile_patterns"]
