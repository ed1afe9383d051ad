"""Penstock gateway: admits, routes, relays and bills the requests of many tenants."""
