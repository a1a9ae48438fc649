"""Records requests in the audit log."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.access.audit import (
    CHANGES,
    AuditAction,
    AuditEvent,
    action_of,
    is_recorded,
    outcome_of,
)
from ragcache_core.errors import Unavailable
from ragcache_gateway.audit.log import AuditLog
from ragcache_gateway.audit.notes import AuditNotes, current
from ragcache_gateway.http.disconnect import ClientDisconnected
from ragcache_gateway.http.errors import response_to
from ragcache_gateway.telemetry.tenant_metrics import CLIENT_CLOSED_STATUS

REQUEST_ID_HEADER: Final = "X-Request-Id"

_AT_START: Final = CHANGES - {AuditAction.DOCUMENT_BATCH}
"""Actions whose line is durable before the client gets the first byte. A batch tells what became of
its documents at its end."""


class AuditTrail:
    """Records each request at its end; a change, and a copy of all documents, before its answer."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _AuditedRequest(scope, self._log)

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request.id
                if request.action in _AT_START:
                    request.end()
                    await self._log.written()
            await send(message)

        try:
            with current(request.notes):
                await self._app(scope, receive, observe)
        except ClientDisconnected:
            request.notes.status = CLIENT_CLOSED_STATUS
            raise
        except asyncio.CancelledError:
            request.notes.status = 503
            raise
        except Exception:
            request.notes.status = 500
            raise
        finally:
            request.end()


class AuditGate:
    """Answers 503 to a change while the audit log cannot be written. Keys are checked before."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and action_of(scope["method"], scope["path"]) in CHANGES:
            try:
                self._log.check()
            except Unavailable as error:
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _AuditedRequest:
    """One request, and what is noted of it."""

    def __init__(self, scope: Scope, log: AuditLog) -> None:
        self.id = uuid.uuid4().hex
        self.action = action_of(scope["method"], scope["path"])
        self.notes = AuditNotes(self._record)
        self.status = 500
        self._scope = scope
        self._log = log
        self._has_ended = False

    def end(self) -> None:
        """Record the request, once."""
        if not self._has_ended:
            self._has_ended = True
            self._record(is_end=True)

    def _record(self, *, is_end: bool = False) -> None:
        scope, notes = self._scope, self.notes
        status = self.status if notes.status is None else notes.status
        outcome = outcome_of(status)
        if not is_recorded(self.action, outcome):
            return
        caller = notes.caller
        documents = notes.take_documents()
        client = scope.get("client")
        self._log.record(
            AuditEvent(
                unix_s=time.time(),
                request_id=self.id,
                action=self.action,
                outcome=outcome,
                status=status,
                method=scope["method"],
                route=getattr(scope.get("route"), "path", "unmatched"),
                address=client[0] if client else "",
                key=None if caller is None else caller.name,
                key_digest=notes.key_digest,
                tenant=None if caller is None else caller.tenant,
                collection=notes.collection,
                # A path may name documents. It never has a text.
                object=notes.object or (None if documents else scope["path"]),
                documents=documents,
                counts=notes.counts if is_end else None,
            )
        )
