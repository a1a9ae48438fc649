"""A prompt that one engine computes and another one decodes, which both get at once.

The engine that decodes waits until the cache store has the prompt's KV, for as long as its plan
says. Then it loads what has been stored so far, and computes the rest. If the other engine fails
before that, the gateway sends it the request again, without a handoff.

Source: Mooncake section 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from ragcache_core.errors import Unavailable
from ragcache_gateway.engines.client import Engine, Work

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A body for an engine, and what it counts in that engine's queue."""

    body: Mapping[str, Any]
    work: Work


@dataclass(frozen=True, slots=True)
class PairedRequest:
    """The requests of two engines for one prompt.

    Attributes:
        prefill: The engine that computes the prompt.
        to_prefill: What it gets.
        to_decode: What the engine that decodes gets.
    """

    prefill: Engine
    to_prefill: EngineCall
    to_decode: EngineCall

    async def answer(self, attempt: Callable[[EngineCall], Awaitable[T]]) -> T | None:
        """Return the answer of the engine that decodes. None: the other engine failed before it.

        Both requests have ended when this returns None, raises, or is cancelled. When it returns an
        answer, the engine that computes the prompt has been told to stop.

        Args:
            attempt: Has the engine that decodes answer.

        Raises:
            Unavailable: The engine that decodes failed.
        """
        prefill = asyncio.create_task(self._compute())
        answer = asyncio.ensure_future(attempt(self.to_decode))
        try:
            await asyncio.wait({prefill, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() or prefill.result():
                return await answer
            return None
        finally:
            answer.cancel()
            prefill.cancel()
            await asyncio.wait({answer, prefill})

    async def _compute(self) -> bool:
        """Have the prompt computed, and return whether that succeeded."""
        try:
            async with AsyncExitStack() as stack:
                call = self.to_prefill
                completion = await self.prefill.complete(call.body, stack, work=call.work)
                async for _ in completion.deltas():
                    pass
        except Unavailable as error:
            self.prefill.record_failure(error)
            log.info("handoff: prefill failed engine=%s error=%s", self.prefill.address, error)
        except Exception:
            log.exception("handoff: prefill failed engine=%s", self.prefill.address)
        else:
            return True
        return False


@dataclass(frozen=True, slots=True)
class Route:
    """Which engines get a request first.

    Attributes:
        engine: The one that answers. None: any.
        handoff: How another engine computes the prompt. None: ``engine`` does both.
    """

    engine: Engine | None = None
    handoff: PairedRequest | None = None
