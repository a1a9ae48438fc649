"""What the user said of a cluster, and whether a command is about one or about this machine."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """Options of a command. namespace: None means that of the context."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether the user named a cluster, or a place in one."""
        return any((self.kubeconfig, self.context, self.namespace))

    @property
    def files(self) -> list[Path]:
        """Where the cluster's address is looked for."""
        if self.kubeconfig is not None:
            return [self.kubeconfig]
        given = os.environ.get("KUBECONFIG", "")
        paths = [Path(path) for path in given.split(os.pathsep) if path]
        return paths or [Path("~/.kube/config").expanduser()]

    @property
    def is_in_cluster(self) -> bool:
        """Whether the cluster is the one that this process is a pod of."""
        told = self.kubeconfig is None and self.context is None
        return told and "KUBERNETES_SERVICE_HOST" in os.environ

    @property
    def is_configured(self) -> bool:
        """Whether there is a cluster to talk to without being told which."""
        return self.is_in_cluster or any(path.is_file() for path in self.files)

    def demand_cluster(self) -> None:
        """Raises InvalidInput if nothing says where a cluster is."""
        if self.is_configured:
            return
        looked = " and ".join(str(path) for path in self.files)
        raise InvalidInput(
            "--kubeconfig", f"there is no {looked}", "name a file, or set KUBECONFIG to one"
        )


def is_meant_here(
    choice: ClusterChoice, name: str | None, data: Path | None, here: Collection[str]
) -> bool:
    """Whether a command is about this machine.

    It is when it says so with --data, or names no cluster and something of that name runs here; and
    when there is no cluster. name: None means any. here: names of what runs on this machine.
    Raises InvalidInput for a command that names both.
    """
    if choice.is_given and data is not None:
        raise InvalidInput(
            "--data", "is of this machine, the other options of a cluster", "leave one of them out"
        )
    if choice.is_given or data is not None:
        return data is not None
    return (bool(here) if name is None else name in here) or not choice.is_configured
