"""Idempotency keys: what two requests with one key share. Redis alone says who of them runs.

``scope.py`` names an entry, ``store.py`` speaks with Redis, ``share.py`` is the owner's side of it, ``reading.py`` a
follower's, ``answers.py`` makes answers of both, and ``service.py`` is what the pipeline asks.
"""
