"""Finds an answer to explain, whichever worker of the gateway has given it.

Each worker keeps its own answers, and any worker may get the request for an explanation. It asks
the others over Unix sockets in the folder that they share. Only processes of the same user can
open that folder, so a worker trusts another one to name the tenant of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import Final

from ragcache_core.errors import NotFound, Unavailable
from ragcache_gateway.explain.explanation import explain
from ragcache_gateway.explain.recent_answers import MAX_ANSWERS, RecentAnswers
from ragcache_gateway.explain.schema import Explanation

log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 2.0
"""Time for another worker to answer."""

MAX_ID_CHARACTERS: Final = 256
"""No answer has a longer id, so other workers are not asked for it."""

_SOCKET_NAME = "answers-{}.sock"


class WorkerAnswers:
    """Explains answers of all workers of a gateway.

    Args:
        recent: The answers of this worker.
        folder: Folder that all workers share. None: this process is the only one.
        index: Index of this worker.
    """

    def __init__(
        self,
        recent: RecentAnswers,
        folder: Path | None = None,
        index: int = 0,
        *,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> None:
        self._recent = recent
        self._folder = folder
        self._own_name = _SOCKET_NAME.format(index)
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer other workers. If that fails, they do not find this worker's answers."""
        if self._folder is None:
            return
        path = self._folder / self._own_name
        try:
            path.unlink(missing_ok=True)  # of a worker that was killed
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError as error:
            log.warning("worker answers: cannot listen path=%s error=%s", path, error)

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    async def explain(
        self, answer_id: str, tenant: str | None = None, *, of_any_tenant: bool = False
    ) -> Explanation:
        """Explain an answer of any worker.

        Args:
            tenant: Whose answer it has to be; None: that of a caller without a tenant.
            of_any_tenant: Whether it may be of any tenant.

        Raises:
            NotFound: No worker has it, or it is another tenant's.
            Unavailable: A worker that may have it did not answer in time.
        """
        answered = self._recent.find(answer_id, tenant, of_any_tenant=of_any_tenant)
        if answered is not None:
            return explain(answered)
        request = {"id": answer_id, "tenant": tenant, "of_any_tenant": of_any_tenant}
        if len(answer_id) <= MAX_ID_CHARACTERS:
            found = await self._ask_others(json.dumps(request).encode() + b"\n")
            if found is not None:
                return found
        raise NotFound(
            "request",
            answer_id,
            f"explain one of the last {MAX_ANSWERS} answers of the gateway that gave it: each "
            "replica knows its own. Or ask again with ragcache.explain: true",
        )

    async def _ask_others(self, request: bytes) -> Explanation | None:
        """Return what the first worker that has the answer says. Raises Unavailable."""
        asked = [asyncio.create_task(self._ask(path, request)) for path in self._other_sockets()]
        problem: Unavailable | None = None
        try:
            for task in asyncio.as_completed(asked):
                try:
                    found = await task
                except Unavailable as error:
                    problem = error
                    continue
                if found is not None:
                    return found
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if problem is not None:
            raise problem
        return None

    def _other_sockets(self) -> list[Path]:
        if self._folder is None:
            return []
        sockets = self._folder.glob(_SOCKET_NAME.format("*"))
        return [path for path in sockets if path.name != self._own_name]

    async def _ask(self, path: Path, request: bytes) -> Explanation | None:
        """Ask one worker. None: it does not have the answer, or it has ended and lost it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_unix_connection(path)
                with contextlib.closing(writer):
                    writer.write(request)
                    await writer.drain()
                    # As large as the parts of a prompt, which ``RecentAnswers`` bounds.
                    reply = await reader.read()
        except TimeoutError:
            log.warning("worker answers: no answer in time socket=%s", path.name)
            raise Unavailable(
                "gateway", f"one of its workers did not answer in {self._timeout_s:g} s"
            ) from None
        except OSError as error:
            log.info("worker answers: not reachable socket=%s error=%s", path.name, error)
            return None
        return Explanation.model_validate_json(reply) if reply else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer another worker with an explanation in JSON, or with nothing."""
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = json.loads(await reader.readline())
                answered = self._recent.find(
                    asked["id"], asked["tenant"], of_any_tenant=asked["of_any_tenant"]
                )
                if answered is not None:
                    writer.write(explain(answered).model_dump_json().encode())
                    await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            log.info("worker answers: request abandoned error=%r", error)
        finally:
            writer.close()
