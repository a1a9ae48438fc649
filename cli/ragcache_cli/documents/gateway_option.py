"""Options of the commands that talk to a gateway."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from ragcache_cli.local.state_file import find_data
from ragcache_core.errors import InvalidInput

GATEWAY_VARIABLE: Final = "RAGCACHE_GATEWAY"

GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="URL",
        envvar=GATEWAY_VARIABLE,
        help="Gateway to talk to.",
        show_default="the one that `ragcache up` runs here",
    ),
]
CollectionOption = Annotated[str, typer.Option("--collection", "-c", help="Collection.")]


def gateway_url(given: str | None) -> str:
    """Return the gateway URL: from the option or variable, else of the local platform."""
    if given is None:
        return find_data(None)[1].gateway_url
    if not given.startswith(("http://", "https://")):
        where = GATEWAY_VARIABLE if os.environ.get(GATEWAY_VARIABLE) == given else "--gateway"
        raise InvalidInput(where, f"{given!r} is no URL", "write it like http://127.0.0.1:8080")
    return given.rstrip("/")
