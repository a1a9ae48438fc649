"""Limits that no busy machine reaches. A test about one of them shortens it."""

from tests.integration.kv.conftest import long_limits

__all__ = ["long_limits"]
