"""Options of the commands that talk to a gateway."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from ragcache_cli.clients.gateway_client import API_KEY_VARIABLE, GatewayTarget
from ragcache_cli.local.key_files import read_api_key
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
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar=API_KEY_VARIABLE,
        help="API key for the gateway.",
        show_default="that of the platform that `ragcache up` runs here",
    ),
]
CollectionOption = Annotated[str, typer.Option("--collection", "-c", help="Collection.")]


def gateway_target(given: str | None, api_key: str | None) -> GatewayTarget:
    """Return the gateway of the option or variable, else that of the local platform.

    Without a key, the local platform's own one applies.
    """
    if given is None:
        data, record = find_data(None, option="--gateway")
        return GatewayTarget(record.gateway_url, api_key or read_api_key(data))
    if not given.startswith(("http://", "https://")):
        where = GATEWAY_VARIABLE if os.environ.get(GATEWAY_VARIABLE) == given else "--gateway"
        raise InvalidInput(where, f"{given!r} is no URL", "write it like http://127.0.0.1:8080")
    return GatewayTarget(given.rstrip("/"), api_key)
