"""What an engine's record says of requests."""

from __future__ import annotations

STORE_AWAY = ("store unavailable", "lookup late")
"""While its store is gone: which one depends on whether the connection's end or the deadline comes
first."""
