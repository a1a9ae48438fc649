"""What an engine does of a request: all of it, or one of its two halves."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """An engine's part in requests that are handed over (``ReusePlan.handoff``).

    By vLLM's own names for it (kv_role). Any engine serves whatever else it is asked.
    """

    BOTH = "kv_both"  # hands nothing over, waits for nothing
    PREFILL = "kv_producer"  # computes prompts and stores them to their last token but one
    DECODE = "kv_consumer"  # waits for that and goes on from there
