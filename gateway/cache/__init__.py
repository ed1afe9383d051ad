"""Answers already known: kept for each tenant apart, found again by the same request or by one of the same meaning."""
