"""The operator as a process outside the cluster, and what its chart would install."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from harness.processes import Service, answers
from ragcache_operator.kube import resources
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import serves_our_kinds

ROOT: Final = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE: Final = "ragcache-system"
_LIMIT_S: Final = 120.0


async def install(api: Api) -> None:
    """Create the operator's namespace and the CRDs, and wait until they are served."""
    await api.create(resources.NAMESPACES, {"metadata": {"name": OPERATOR_NAMESPACE}})
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        await api.create(resources.CRDS, yaml.safe_load(path.read_text()))
    deadline = time.monotonic() + _LIMIT_S
    while not await serves_our_kinds(api):
        if time.monotonic() > deadline:
            raise TimeoutError("the API server does not serve the CRDs")
        await asyncio.sleep(0.2)


def quickstart() -> dict[str, Any]:
    """Return the manifest of the quickstart's RagCache."""
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    return manifest


@contextlib.contextmanager
def running_operator_process(folder: Path, kubeconfig: Path, port: int) -> Iterator[None]:
    """Run an operator that serves health and metrics on a port, with its log in a folder."""
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "RAGCACHE_LISTEN_PORT": str(port),
        "RAGCACHE_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "ragcache_operator"]
    service = Service("operator", command, environment, folder / "operator.log")
    try:
        service.wait_until("alive", lambda: answers(f"http://127.0.0.1:{port}/healthz"))
        yield
    finally:
        service.stop()
