"""Compares bytes with the checksums of a value's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragcache_core.identity.variant import ValuePart
from ragcache_kv.values.buffers import Verifier


def matches_checksums(sources: Iterable[memoryview], parts: Sequence[ValuePart]) -> bool:
    """Return whether sources, one after another, match the checksums of parts."""
    verifier = Verifier(parts)
    for source in sources:
        verifier.add(source)
        if not verifier.good:
            return False
    return verifier.complete and verifier.good
