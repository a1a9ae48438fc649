"""Which part of a request an engine runs: all of it, or one half of a handoff."""

from __future__ import annotations

from enum import StrEnum


class EngineRole(StrEnum):
    """An engine's part in requests with a handoff (``ReusePlan.handoff``).

    The values are those of vLLM's ``kv_role``. An engine of any role serves all other requests.
    """

    BOTH = "kv_both"  # takes part in no handoff
    PREFILL = "kv_producer"  # computes a prompt and stores it, except for the last token
    DECODE = "kv_consumer"  # waits until the store has the prompt, and decodes
