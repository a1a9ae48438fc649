"""An operator that reconciles against a real API server, so that its metrics have data."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import yaml

from harness.cluster.control_plane import start_control_plane
from harness.processes import free_port
from ragcache_operator.kube import resources
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import serves_our_kinds
from tools.dashboards.files import ROOT

_LIMIT_S: Final = 60.0
_STOP_LIMIT_S: Final = 30.0
_CHANGE_S: Final = 2.0
_NAMESPACE: Final = "default"
_OPERATOR_NAMESPACE: Final = "ragcache-system"
"""Of the operator. Its chart would create it."""


@contextlib.contextmanager
def running_operator(folder: Path) -> Iterator[int]:
    """Run an operator with one RagCache, and yield the port of its metrics.

    Raises:
        Unavailable: This machine cannot run an API server.
    """
    with start_control_plane(folder) as plane:
        port = free_port()
        environment = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig),
            "RAGCACHE_LISTEN_PORT": str(port),
            "RAGCACHE_LOG_LEVEL": "warning",
        }
        asyncio.run(_install(plane.kubeconfig))
        process = subprocess.Popen([sys.executable, "-m", "ragcache_operator"], env=environment)
        try:
            _wait_until_alive(port)
            name = asyncio.run(_create(plane.kubeconfig))
            with _changing(plane.kubeconfig, name):
                yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _install(kubeconfig: Path) -> None:
    namespace = {
        "apiVersion": resources.NAMESPACES.api_version,
        "kind": resources.NAMESPACES.kind,
        "metadata": {"name": _OPERATOR_NAMESPACE},
    }
    async with await Api.connect(kubeconfig) as api:
        await api.create(resources.NAMESPACES, namespace)
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            await api.create(resources.CRDS, yaml.safe_load(path.read_text()))
        deadline = time.monotonic() + _LIMIT_S
        while not await serves_our_kinds(api):
            if time.monotonic() > deadline:
                raise RuntimeError("the API server does not serve the CRDs")
            await asyncio.sleep(0.2)


async def _create(kubeconfig: Path) -> str:
    """Create a RagCache and return its name."""
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
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


def _wait_until_alive(port: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    with httpx.Client(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"http://127.0.0.1:{port}/healthz").is_success:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError("the operator does not answer")
            time.sleep(0.2)
