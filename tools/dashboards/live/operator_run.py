"""An operator that reconciles against a real API server, so that its metrics have data."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from harness.cluster.control_plane import start_control_plane
from harness.cluster.operator_process import install, quickstart, running_operator_process
from harness.processes import free_port
from ragcache_operator.kube import resources
from ragcache_operator.kube.api import Api

_STOP_LIMIT_S: Final = 30.0
_CHANGE_S: Final = 2.0
_NAMESPACE: Final = "default"


@contextlib.contextmanager
def running_operator(folder: Path) -> Iterator[int]:
    """Run an operator with one RagCache, and yield the port of its metrics.

    Raises:
        Unavailable: This machine cannot run an API server.
    """
    with start_control_plane(folder) as plane:
        port = free_port()
        asyncio.run(_install(plane.kubeconfig))
        with running_operator_process(folder, plane.kubeconfig, port):
            name = asyncio.run(_create(plane.kubeconfig))
            with _changing(plane.kubeconfig, name):
                yield port


async def _install(kubeconfig: Path) -> None:
    async with await Api.connect(kubeconfig) as api:
        await install(api)


async def _create(kubeconfig: Path) -> str:
    """Create a RagCache and return its name."""
    manifest = quickstart()
    manifest["metadata"]["namespace"] = _NAMESPACE
    async with await Api.connect(kubeconfig) as api:
        created = await api.create(resources.RAG_CACHES, manifest)
    return str(created["metadata"]["name"])


@contextlib.contextmanager
def _changing(kubeconfig: Path, name: str) -> Iterator[None]:
    """Change a RagCache until the block ends: without pods, nothing else starts passes."""
    stopping = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_change(kubeconfig, name, stopping)), name="changes"
    )
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_STOP_LIMIT_S)


async def _change(kubeconfig: Path, name: str, stopping: threading.Event) -> None:
    async with await Api.connect(kubeconfig) as api:
        for number in itertools.count():
            if stopping.is_set():
                return
            changed = {"metadata": {"annotations": {"example.com/change": str(number)}}}
            await api.merge(resources.RAG_CACHES, name, _NAMESPACE, changed)
            await asyncio.sleep(_CHANGE_S)
