"""vLLM's entry point ``vllm.stat_logger_plugins``: records in the API server that a step ended."""

from __future__ import annotations

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from ragcache_engine.telemetry.health import LAST_STEP


class StepLogger(StatLoggerBase):  # type: ignore[misc]
    """Tells ``HealthMiddleware`` of steps. vLLM makes one, and calls it after every step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        LAST_STEP.ended_s = time.monotonic()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Record that a step ended."""
        LAST_STEP.ended_s = time.monotonic()

    def log_engine_initialized(self) -> None:
        """Log nothing."""
