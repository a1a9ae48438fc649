"""The line about documents that are prepared again."""

from __future__ import annotations

from ragcache_cli.output.console import printable


def remake_line(collection: str, num_done: int, num_documents: int, reason: str) -> str:
    """Return the progress of a collection whose documents are prepared again.

    Args:
        reason: What has changed, like ``embedder``.
    """
    counts = f"{num_done:,} of {num_documents:,} documents"
    return f"remake of {printable(collection)}: {counts} ({printable(reason)})"
