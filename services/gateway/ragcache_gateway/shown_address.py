"""Addresses of engines and backends in responses. Only callers with the scope admin see them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import PlainSerializer

from ragcache_core.access.server_names import ServerNames


@dataclass(frozen=True, slots=True)
class AddressView:
    """How the caller of a request sees addresses.

    Attributes:
        shows: Whether it sees them. Otherwise it sees the names.
    """

    names: ServerNames
    shows: bool


_view: ContextVar[AddressView | None] = ContextVar("address_view", default=None)
_OWN: Final = AddressView(ServerNames(secrets.token_bytes(32)), shows=True)
"""That of the gateway itself, outside of requests."""

NAME_HELP: Final = "Name of the server for callers without the scope admin, who see no addresses."


@contextmanager
def viewing(view: AddressView) -> Iterator[None]:
    """Show addresses so to the caller of all work inside."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def shown(text: str) -> str:
    """Return a text as the caller may see it."""
    view = _view.get() or _OWN
    return text if view.shows else view.names.replace_in(text)


def server_name(address: str) -> str:
    """Return the name of a server, which every caller may see."""
    return (_view.get() or _OWN).names.of(address)


ShownText = Annotated[str, PlainSerializer(shown, return_type=str)]
"""Type of a response's field that has an address, or may have one in an error."""
