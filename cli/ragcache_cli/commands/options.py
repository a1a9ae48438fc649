"""Options that several commands have, and groups of options that belong together.

A command takes a group as one argument: a frozen dataclass whose fields are options or arguments.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import typer

from ragcache_cli.clients.gateway_client import (
    API_KEY_VARIABLE,
    CA_FILE_VARIABLE,
    GatewayApiClient,
    GatewayTarget,
)
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_cli.local.key_files import gateway_certificate, read_api_key
from ragcache_cli.local.state_file import PlatformRecord, find_data
from ragcache_core.errors import InvalidInput

R = TypeVar("R")

GATEWAY_VARIABLE: Final = "RAGCACHE_GATEWAY"
FAILED: Final = 1
"""Exit status of a failure that is no mistake of the user."""

OutputOption = Annotated[
    Literal["text", "json"], typer.Option("--output", "-o", help="Form of the result.")
]
CollectionOption = Annotated[str, typer.Option("--collection", "-c", help="Collection.")]
ManifestOption = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="Manifest of a RagCache.")
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data folder.", show_default=".ragcache/NAME"),
]
NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A RagCache.", show_default="the only one"),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig.", show_default="its current"
    ),
]
KubeconfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Path of the kubeconfig.", show_default="$KUBECONFIG"
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each dataclass argument has its fields as separate options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        if given.name in groups:
            parameters += _parameters_of(groups[given.name])
        else:
            parameters.append(given.replace(annotation=hints[given.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        command(**given)

    # Typer reads the signature, and evaluates these annotations.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    del run.__wrapped__
    return run


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
            annotation=hints[one.name],
        )
        for one in fields(group)
    ]


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The gateway that a command talks to."""

    gateway: Annotated[
        str | None,
        typer.Option(
            "--gateway",
            metavar="URL",
            envvar=GATEWAY_VARIABLE,
            help="Gateway to talk to.",
            show_default="the one that `ragcache up` runs here",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar=API_KEY_VARIABLE,
            help="API key for the gateway.",
            show_default="that of the platform that `ragcache up` runs here",
        ),
    ] = field(default=None, repr=False)
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            metavar="FILE",
            envvar=CA_FILE_VARIABLE,
            help="Authorities of an https gateway, in PEM.",
            show_default="the public ones",
        ),
    ] = None

    @property
    def target(self) -> GatewayTarget:
        """The gateway of the option or variable, else that of the local platform.

        Without a key, the local platform's own one applies.

        Raises:
            InvalidInput: The option is no URL, or no platform runs here.
        """
        given = self.gateway
        if given is None:
            data, record = find_data(None, option="--gateway")
            return local_target(data, record, self.api_key)
        if not given.startswith(("http://", "https://")):
            where = GATEWAY_VARIABLE if os.environ.get(GATEWAY_VARIABLE) == given else "--gateway"
            raise InvalidInput(where, f"{given!r} is no URL", "write it like http://127.0.0.1:8080")
        return GatewayTarget(given.rstrip("/"), self.api_key, self.ca_file)

    def call(self, action: Callable[[GatewayApiClient], Awaitable[R]]) -> R:
        """Return the result of calls to the gateway."""
        return call_gateway(self.target, action)


def local_target(data: Path, record: PlatformRecord, api_key: str | None = None) -> GatewayTarget:
    """Return the gateway of the platform that runs in a data folder.

    Args:
        api_key: None: the key of the commands of this user, if the platform needs one.
    """
    is_tls = record.gateway_url.startswith("https://")
    return GatewayTarget(
        record.gateway_url,
        api_key or read_api_key(data),
        certificate=gateway_certificate(data) if is_tls else None,
    )


def call_gateway(target: GatewayTarget, action: Callable[[GatewayApiClient], Awaitable[R]]) -> R:
    """Return the result of calls to a gateway."""

    async def run() -> R:
        async with GatewayApiClient(target) as client:
            return await action(client)

    return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster and the namespace that a command is about."""

    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="NAME", help="Namespace.", show_default="the context's"
        ),
    ] = None
    context: ContextOption = None
    kubeconfig: KubeconfigOption = None

    @property
    def choice(self) -> ClusterChoice:
        """The cluster."""
        return ClusterChoice(self.kubeconfig, self.context, self.namespace)
