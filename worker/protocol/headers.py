"""Names of the HTTP headers that gateway and worker exchange (lower case, as ASGI delivers them).

A worker obeys the ``x-penstock-*`` request headers only on a request that carries the fleet token.
"""

REQUEST_ID = "x-request-id"
"""Id of the request (UUIDv7 text), assigned by the gateway; it appears in every log line on both sides."""

TENANT_SALT = "x-penstock-tenant-salt"
"""Opaque text that differs between tenants; part of every block name, so that tenants share no cached prompt."""

TENANT = "x-penstock-tenant"
"""Opaque name of the tenant, for fairness between tenants."""

WEIGHT = "x-penstock-weight"
"""The tenant's share beside others': a number above 0; 1 if absent."""

PRIORITY = "x-penstock-priority"
"""Integer scheduling class; lower runs first. Comes from key and route, never from a tenant's body."""

CLAMP_OUTPUT = "x-penstock-clamp-output"
"""``1``: ``max_tokens`` in the body is the route's default, so a worker shortens it to what fits."""

METER = "x-penstock-meter"
"""``1``: answer as an event stream with running usage in comments, for whole answers too (see ``meter``)."""
