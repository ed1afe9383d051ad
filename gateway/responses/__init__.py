"""Responses that later requests may build upon: kept for each tenant alone, sealed, until they expire.

``store.py`` keeps and finds them, ``conversation.py`` says what of each, ``keeping.py`` keeps an answer on its way to
the client, and ``retention.py`` removes what expired.
"""
