"""Reads JSON bodies: bounded first, and large ones outside the event loop.

A parser makes an object for every value, and each walk over a body visits all of them. So one body
could hold the event loop, and with it every stream and every health check.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ragcache_core.access.caller import Caller
from ragcache_core.access.json_bounds import MAX_VALUES, check_json
from ragcache_core.errors import InvalidInput
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.errors import from_validation
from ragcache_gateway.http.middleware.key_check import CALLER

T = TypeVar("T")

LARGE_BYTES: Final = 64 << 10
LARGE_VALUES: Final = 500
"""Bodies over one of these are read in a thread. Smaller ones take a millisecond or less."""

TURN_TIMEOUT_S: Final = 10.0
"""Time for a large body to wait for the others of its key."""

_TOKEN_IDS_PATH: Final = "/v1/completions"


def json_object(
    body: bytes, field: str = "body", fix: str = "send a JSON object", max_values: int = MAX_VALUES
) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        field: Path of the JSON in the request, for errors.
        fix: What to send instead of something else.

    Raises:
        InvalidInput: It is something else, has too many values, or is nested too deep.
    """
    value = _parsed(body, field, max_values)
    if not isinstance(value, dict):
        raise InvalidInput(field, "is not a JSON object", fix)
    return value


def _parsed(body: bytes, field: str, max_values: int) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(field, "is not UTF-8", "send JSON in UTF-8") from error
    check_json(body, field, max_values)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(field, f"is not valid JSON ({error})", "send a JSON object") from error


def _is_large(body: bytes) -> bool:
    return len(body) > LARGE_BYTES or body.count(b",") > LARGE_VALUES


class LargeBodies:
    """Reads the large bodies of each key one after the other, in threads.

    Args:
        max_model_len: Tokens that the model with the longest context holds. A request may have as
            many token ids.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_token_ids = max_model_len
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, caller: Caller, body: bytes, read: Callable[[bytes], T]) -> T:
        """Return what a function makes of a body.

        Raises:
            Refused: Other large bodies of this key are read for too long.
        """
        if not _is_large(body):
            return read(body)
        turn = self._turns.setdefault(caller.name, asyncio.Lock())
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await turn.acquire()
        except TimeoutError:
            problem = "other large bodies of this key are being read; send one at a time"
            raise Refused(RefusalCode.POOL_FULL, problem, TURN_TIMEOUT_S) from None
        try:
            return await asyncio.to_thread(read, body)
        finally:
            turn.release()


def large_bodies(request: Request) -> LargeBodies:
    """Return what reads the large bodies of a gateway."""
    found: LargeBodies = request.app.state.large_bodies
    return found


async def read_body(request: Request, read: Callable[[bytes], T]) -> T:
    """Return what a function makes of the body of a request. Raises Refused."""
    caller: Caller = getattr(request.state, CALLER)
    return await large_bodies(request).read(caller, await request.body(), read)


class _BoundedRequest(Request):
    """A request whose JSON is bounded, and validated where it is parsed."""

    async def json(self) -> Any:
        return await read_body(self, self._parsed)

    def _parsed(self, body: bytes) -> Any:
        ids = large_bodies(self).max_token_ids if self.scope["path"] == _TOKEN_IDS_PATH else 0
        value = _parsed(body, "body", MAX_VALUES + ids)
        if not _is_large(body):
            return value
        # FastAPI would validate it in the event loop, and does nothing with a valid object.
        valid, errors = self.scope["route"].body_field.validate(value, {}, loc=("body",))
        if errors:
            raise from_validation(errors)
        return valid


class JsonRoute(APIRoute):
    """A route with a JSON body. Every route with one is of this class."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded
