"""Proves that all that is counted agrees: Redis' counters, open requests, the ledger's rows, their sums."""
