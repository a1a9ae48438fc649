"""The compiled shift of a packed cache does what the torch operations do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.engine.kv_cache.test_paged_cache import BLOCK

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_core.blend.chunk_shift import plan_shift
from ragcache_core.blend.token_selection import runs_outside
from ragcache_engine.blend.chunk_shift import ChunkShift, _TorchShift
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import PromptSlice
from ragcache_kv.rotation import Pairing, Rope
from tests.unit.engine.kv_cache.test_paged_cache import DIM, HEADS, LAYERS, ORDERS, FakeLayer

NUM_TOKENS = 3 * BLOCK + 5
TABLE = [7, 2, 5, 1]
CHUNKS = [range(4, 40), range(40, 90), range(90, 96)]
RUNS = [range(6, 14), range(30, 33), range(50, 58), range(96, NUM_TOKENS)]
SHIFTED_RUNS = runs_outside(CHUNKS, RUNS)

ROPES = {
    "halves": Rope(DIM, DIM, Pairing.HALVES, tuple(10.0**-i for i in range(DIM // 2))),
    "neighbours": Rope(DIM, DIM, Pairing.NEIGHBOURS, tuple(10.0**-i for i in range(DIM // 2))),
    "in part": Rope(DIM, DIM // 2, Pairing.HALVES, tuple(10.0**-i for i in range(DIM // 4))),
}
ROPES["by layer"] = replace(
    ROPES["halves"],
    by_layer=tuple((theta,) * (DIM // 2) for theta in (1.0, 0.0, 0.3)),
)


def filled_cache(order: str, dtype: torch.dtype) -> PagedCache:
    layers = {f"layer.{index}": FakeLayer(ORDERS[order], dtype) for index in range(LAYERS)}
    cache = PagedCache(layers, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(LAYERS, 2, NUM_TOKENS, HEADS, DIM, generator=generator).to(dtype)
    cache.write(old, cache.slots(TABLE, 0, NUM_TOKENS))
    return cache


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ORDERS)
def test_the_compiled_shift_equals_the_one_of_a_gpu(
    order: str, dtype: torch.dtype, rope: Rope
) -> None:
    compiled, expected = filled_cache(order, dtype), filled_cache(order, dtype)
    one = PromptSlice(list(range(NUM_TOKENS)), TABLE, RUNS, CHUNKS, SHIFTED_RUNS)
    slots = torch.cat([compiled.slots(TABLE, run.start, run.stop) for run in RUNS])
    generator = torch.Generator().manual_seed(5)
    # Rows of vLLM's own come first. The model's keys and values are views of one projection.
    own = 3
    both = torch.randn(own + len(slots), 2 * HEADS, DIM, generator=generator).to(dtype)
    key, value = both[:, :HEADS], both[:, HEADS:]
    own_slots = torch.arange(own) + 3 * BLOCK

    plan = plan_shift(CHUNKS, RUNS, SHIFTED_RUNS)
    assert plan is not None
    assert plan.positions.tolist() == [p for run in SHIFTED_RUNS[:-1] for p in run]
    assert SHIFTED_RUNS[-1] == CHUNKS[-1], "the third chunk has no recomputed token"
    by_torch = _TorchShift.of(one, plan, slice(-len(slots), None), expected, rope)
    with ChunkShift(compiled, rope).attached([one]):
        for index in range(LAYERS):
            layer = compiled.layers[index]
            to = torch.cat([own_slots, slots])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, to)

            def write(keys: torch.Tensor, values: torch.Tensor, to: torch.Tensor) -> None:
                layer = expected.layers[index]  # noqa: B023
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, to)

            by_torch.shift(index, key, value, write)
            write(key, value, torch.cat([own_slots, slots]))

    found = compiled.read(TABLE, 0, NUM_TOKENS).float()
    wanted = expected.read(TABLE, 0, NUM_TOKENS).float()
    before = filled_cache(order, dtype).read(TABLE, 0, NUM_TOKENS).float()
    shifted = torch.from_numpy(plan.positions)
    assert not torch.equal(found[:, :, shifted], before[:, :, shifted])
    others = [p for p in range(NUM_TOKENS) if p not in plan.positions.tolist()]
    assert torch.equal(found[:, :, others], wanted[:, :, others])
    # Sums are in another order, which may round to the neighbouring number.
    torch.testing.assert_close(
        found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
    )


def test_each_layer_is_shifted_by_its_own_rotation() -> None:
    """Only the angles of the layer decide: one that does not rotate adds keys as they are."""
    one = PromptSlice(list(range(NUM_TOKENS)), TABLE, RUNS, CHUNKS, SHIFTED_RUNS)
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(map(len, RUNS))
    both = torch.randn(num_rows, 2 * HEADS, DIM, generator=generator)

    def shifted(rope: Rope) -> torch.Tensor:
        cache = filled_cache("as presented", torch.float32)
        slots = torch.cat([cache.slots(TABLE, run.start, run.stop) for run in RUNS])
        with ChunkShift(cache, rope).attached([one]):
            for layer in cache.layers:
                key, value = both[:, :HEADS], both[:, HEADS:]
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        return cache.read(TABLE, 0, NUM_TOKENS)

    rope = ROPES["by layer"]
    together = shifted(rope)
    alone = [shifted(rope.of_layer(index)) for index in range(LAYERS)]
    for index in range(LAYERS):
        assert torch.equal(together[index], alone[index][index])
    assert not torch.equal(alone[0][1], alone[1][1])


def test_shifting_ends_with_the_context() -> None:
    cache = filled_cache("as presented", torch.float32)
    one = PromptSlice(list(range(NUM_TOKENS)), TABLE, RUNS, CHUNKS, SHIFTED_RUNS)
    update = cache.layers[0].impl.do_kv_cache_update
    with ChunkShift(cache, ROPES["halves"]).attached([one]):
        assert cache.layers[0].impl.do_kv_cache_update != update
    assert cache.layers[0].impl.do_kv_cache_update == update
