"""A whole Penstock on one machine, without Docker: embedded Postgres and Redis, a worker, a gateway, a supervisor."""
