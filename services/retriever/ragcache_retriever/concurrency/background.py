"""Keeps errors from ending background tasks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from ragcache_core.errors import RagCacheError


async def attempted(log: logging.Logger, failure: str, step: Awaitable[object]) -> bool:
    """Await one step of a background task, and log its error.

    The task pauses and tries again. An unexpected error is a defect, so its traceback is logged.

    Args:
        failure: What has failed, for the log.

    Returns:
        Whether the step succeeded.
    """
    try:
        await step
    except RagCacheError as error:
        log.warning("%s error=%s", failure, error)
        return False
    except Exception:
        log.exception("%s", failure)
        return False
    return True
