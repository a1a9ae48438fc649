"""The header with the deadline of a request, for proxies and for clients of OpenAI's libraries."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Header

from ragcache_gateway.chat.schema import MAX_DEADLINE_MS

DEADLINE_HEADER: Final = "X-RagCache-Deadline-Ms"

DeadlineHeader = Annotated[
    int | None,
    Header(
        alias=DEADLINE_HEADER,
        ge=1,
        le=MAX_DEADLINE_MS,
        description="As `ragcache.deadline_ms`; the lower one counts.",
    ),
]
