"""Finds out who asks, by an API key or a token, and refuses what this does not allow."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from ragcache_core.access.caller import ANYONE, Caller, Scope
from ragcache_core.access.endpoints import allowed_scopes, is_on_ask_port
from ragcache_core.access.server_names import ServerNames
from ragcache_core.errors import NotFound, RagCacheError
from ragcache_gateway.audit.notes import note_caller, note_unknown_key
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.auth.bearer_tokens import BearerTokens, TokenRefused
from ragcache_gateway.http.errors import InvalidToken, MissingScope, NotAuthenticated, response_to
from ragcache_gateway.shown_address import AddressView, viewing
from ragcache_wire.asking import asking

CALLER: Final = "caller"
"""Name of the caller in a request's state."""

_KEY_HEADERS: Final = (b"authorization", b"api-key", b"x-api-key")
_SCHEME: Final = "bearer"

IDENTITY_HEADERS: Final = frozenset(
    {
        *_KEY_HEADERS,
        b"cookie",
        b"forwarded",
        b"proxy-authorization",
        b"x-auth-request-email",
        b"x-auth-request-user",
        b"x-forwarded-email",
        b"x-forwarded-groups",
        b"x-forwarded-user",
        b"x-priority",
        b"x-remote-user",
        b"x-scope-orgid",
        b"x-tenant",
        b"x-tenant-id",
        b"x-user",
        b"x-user-id",
    }
)
"""Headers that tell other systems who asks. Only a key counts here, so nothing after this
middleware sees them. The key itself is dropped with them: nothing can log it or pass it on."""


class KeyCheck:
    """Puts the caller into the request's state. Answers 401 without a valid key, 403 without the
    scope.

    Args:
        keys: None: requests need no key, and every caller may do everything.
        tokens: Verify tokens, which may stand for a key.
        names: Of servers, for callers that may not see addresses.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        tokens: BearerTokens,
        names: ServerNames,
    ) -> None:
        self._app = app
        self._keys = keys
        self._tokens = tokens
        self._views = {shows: AddressView(names, shows) for shows in (False, True)}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._caller_of(scope)
        except RagCacheError as error:
            await response_to(error)(scope, receive, send)
            return
        scope["headers"] = [
            (name, value) for name, value in scope["headers"] if name not in IDENTITY_HEADERS
        ]
        scope.setdefault("state", {})[CALLER] = caller
        with viewing(self._views[caller.may(Scope.ADMIN)]), asking(caller.name):
            await self._app(scope, receive, send)

    async def _caller_of(self, scope: AsgiScope) -> Caller:
        """Return the caller of a request.

        Raises:
            NotAuthenticated: It has no valid key, and no valid token.
            MissingScope, NotAllowed: It may not do this.
            Unavailable: The issuer of its token does not answer.
        """
        allowed = allowed_scopes(scope["method"], scope["path"])
        if self._keys is None or not allowed:
            note_caller(ANYONE)
            return ANYONE
        key = _key_of(scope)
        if key is None:
            raise NotAuthenticated("is missing")
        caller = self._keys.find(key) or await self._token_caller(self._keys, key)
        if caller is None:
            note_unknown_key(key)
            raise NotAuthenticated("is not known")
        note_caller(caller)
        if not caller.may(*allowed):
            raise MissingScope(caller.name, allowed)
        return caller

    async def _token_caller(self, keys: ApiKeys, text: str) -> Caller | None:
        try:
            found = await self._tokens.claims_of(text)
            return None if found is None else keys.token_caller(*found)
        except TokenRefused as error:
            note_unknown_key(text)
            raise InvalidToken(error.problem) from error
        except RagCacheError:
            note_unknown_key(text)
            raise


def _key_of(scope: AsgiScope) -> str | None:
    """Return the key that a request sends: as OpenAI's clients do, or as Azure's do."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == _SCHEME and key.strip():
        return key.strip()
    for name in _KEY_HEADERS[1:]:
        if name in headers:
            return headers[name].decode("latin-1").strip()
    return None


class PortGuard:
    """Answers 404 to a path that the port of the connection does not serve.

    The port is that of the socket, which no header of a request can change.

    Args:
        admin_port: The port that serves every path.
    """

    def __init__(self, app: ASGIApp, admin_port: int) -> None:
        self._app = app
        self._admin_port = admin_port

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and not is_on_ask_port(scope["path"]):
            _, port = scope.get("server") or ("", None)
            if port != self._admin_port:
                fix = "send it to the admin port (spec.gateway.adminPort)"
                error = NotFound("path on this port", scope["path"], fix)
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
