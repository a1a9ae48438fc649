"""The memory that an engine needs, and the check that it has as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.engine_memory import MEMORY_REQUEST, EngineMemory, check_engine_memory
from ragcache_core.errors import InvalidInput

GIB = 1 << 30
sizes = st.integers(0, 1 << 42)
memories = st.builds(EngineMemory, sizes, sizes, sizes)


def test_the_request_has_weights_kv_tier_queue_and_process() -> None:
    assert EngineMemory(15 * GIB, 2 * GIB, 4 * GIB).request_bytes == (15 + 2 + 5 + 3) * GIB


@given(memories)
def test_an_engine_starts_with_the_request_that_follows_from_its_real_weights(
    memory: EngineMemory,
) -> None:
    check_engine_memory(memory, {MEMORY_REQUEST: memory.request_bytes})


@given(
    memories, st.dictionaries(st.sampled_from(["memory limit", MEMORY_REQUEST]), sizes, min_size=1)
)
def test_an_engine_starts_exactly_if_it_fits_every_limit(
    memory: EngineMemory, limits: dict[str, int]
) -> None:
    if all(memory.least_bytes <= limit for limit in limits.values()):
        check_engine_memory(memory, limits)
    else:
        with pytest.raises(InvalidInput):
            check_engine_memory(memory, limits)


def test_a_small_request_is_reported_with_sizes_and_fix() -> None:
    memory = EngineMemory(15 * GIB - 1, 2 * GIB, 0)
    with pytest.raises(InvalidInput) as caught:
        check_engine_memory(memory, {"memory limit": 64 * GIB, MEMORY_REQUEST: 5 * GIB})
    assert str(caught.value) == (
        "spec.engines[].resources: the memory request of 5.00 GiB is too small: the weights take "
        "15.00 GiB, kvMemory 2.00 GiB, hostTier 0 MiB and vLLM at least 1.00 GiB; set "
        "spec.model.weights to 15Gi, which is a guess or 0 if unset, and raise memory and "
        "memoryLimit to 20Gi where they are set"
    )


def test_a_small_limit_needs_another_limit() -> None:
    with pytest.raises(InvalidInput, match="use a memory limit of 20Gi, or a smaller model"):
        check_engine_memory(EngineMemory(15 * GIB, 2 * GIB, 0), {"memory limit": 5 * GIB})
