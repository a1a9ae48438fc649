"""Decides whether a command is about a cluster or about this machine."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The cluster options of a command. A namespace of None means the context's."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def is_given(self) -> bool:
        """Return whether the user named a cluster or a namespace."""
        return any((self.kubeconfig, self.context, self.namespace))

    @property
    def files(self) -> list[Path]:
        """Return the kubeconfig files to read."""
        if self.kubeconfig is not None:
            return [self.kubeconfig]
        given = os.environ.get("KUBECONFIG", "")
        paths = [Path(path) for path in given.split(os.pathsep) if path]
        return paths or [Path("~/.kube/config").expanduser()]

    @property
    def is_in_cluster(self) -> bool:
        """Return whether this process runs in a pod of the cluster."""
        told = self.kubeconfig is None and self.context is None
        return told and "KUBERNETES_SERVICE_HOST" in os.environ

    @property
    def is_configured(self) -> bool:
        """Return whether a cluster is configured without options."""
        return self.is_in_cluster or any(path.is_file() for path in self.files)

    def demand_cluster(self) -> None:
        """Raise InvalidInput if no cluster is configured."""
        if self.is_configured:
            return
        searched = " and ".join(str(path) for path in self.files)
        raise InvalidInput(
            "--kubeconfig", f"there is no {searched}", "name a file, or set KUBECONFIG to one"
        )


def is_meant_here(
    choice: ClusterChoice, name: str | None, data: Path | None, here: Collection[str]
) -> bool:
    """Return whether a command is about this machine.

    It is if ``--data`` is given, if no cluster is configured, or if no cluster is named and a
    platform of that name runs here.

    Args:
        name: The wanted platform; None means any.
        here: Names of the platforms on this machine.

    Raises:
        InvalidInput: The command names both a cluster and this machine.
    """
    if choice.is_given and data is not None:
        raise InvalidInput(
            "--data", "is of this machine, the other options of a cluster", "leave one of them out"
        )
    if choice.is_given or data is not None:
        return data is not None
    return (bool(here) if name is None else name in here) or not choice.is_configured
