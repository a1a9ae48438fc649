"""The header ``Prefer``: what a client would like, and a server may leave undone.

Source: RFC 7240.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Header

RESPOND_ASYNC: Final = "respond-async"

Prefer = Annotated[
    str | None,
    Header(
        description="`respond-async`: accept documents and write them later. The answer to a "
        "document is 202 with its operation.",
    ),
]
"""Type of a route's parameter that gets the header."""


def prefers_async(prefer: str | None) -> bool:
    """Whether a client would rather ask for the result later than wait for it."""
    preferences = (one.partition(";")[0].strip().lower() for one in (prefer or "").split(","))
    return RESPOND_ASYNC in preferences
