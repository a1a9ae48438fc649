"""Where a sync finds what its pod brings: agreed between the Job and ``ragcache sync`` in it."""

from __future__ import annotations

MOUNTS = "/sources"
"""Folder with a mount for each source that is a ConfigMap or a volume."""


def mount_name(index: int) -> str:
    """Name of a source's mount. index: the source's place in the RagCollection, from 0."""
    return f"source-{index}"


def token_variable(index: int) -> str:
    """Environment variable that holds a source's token."""
    return f"RAGCACHE_SOURCE_{index}_TOKEN"
