"""Miss reasons in an engine's request records."""

from __future__ import annotations

STORE_AWAY = ("store unavailable", "lookup timed out")
"""Reasons while the store is away: its connection ends or the deadline passes first."""
