"""vLLM's entry point (``vllm.stat_logger_plugins``): notes in the API server that a step ended."""

from __future__ import annotations

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from ragcache_engine.telemetry.health import STEPS


class StepLogger(StatLoggerBase):  # type: ignore[misc]
    """For ``Health``. vLLM makes one, and calls it after every step with what it counted."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        STEPS.ended_s = time.monotonic()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """A step ended."""
        STEPS.ended_s = time.monotonic()

    def log_engine_initialized(self) -> None:
        """Nothing of note."""
