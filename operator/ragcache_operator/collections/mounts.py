"""Mount paths and environment variables shared by the sync Job and ``ragcache sync``."""

from __future__ import annotations

MOUNTS = "/sources"
"""Folder with one mount for each source that is a ConfigMap or a volume."""


def mount_name(index: int) -> str:
    """Return the mount name of the source with this index in ``spec.sources``."""
    return f"source-{index}"


def token_variable(index: int) -> str:
    """Return the environment variable with the token of the source with this index."""
    return f"RAGCACHE_SOURCE_{index}_TOKEN"
