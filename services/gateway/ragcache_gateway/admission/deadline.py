"""The deadline of a request: the work for it ends when it has passed without a first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.admission.slo import DEADLINE_FIELD, Arrival


@asynccontextmanager
async def within_deadline(arrival: Arrival) -> AsyncGenerator[None, None]:
    """End what runs inside when the deadline passes, so that an engine aborts the request.

    Raises Refused then.
    """
    if arrival.deadline_s is None:
        yield
        return
    limit = asyncio.timeout(max(0.0, arrival.deadline_s - arrival.elapsed_s()))
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        problem = f"{DEADLINE_FIELD}: {1e3 * arrival.deadline_s:.0f} ms have passed without a token"
        fix = "try again later, or allow more"
        raise Refused(
            RefusalCode.DEADLINE_PASSED, f"{problem}; {fix}", 0.0, DEADLINE_FIELD
        ) from error
