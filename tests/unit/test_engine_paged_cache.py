"""Token access to a paged cache, whatever the order inside its blocks."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from ragcache_engine.paged_cache import PagedCache  # noqa: E402

BLOCK, HEADS, DIM, LAYERS, BLOCKS = 32, 2, 16, 3, 9


class FakeLayer:
    """An attention layer whose backend packs keys and values in an order of its own."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(2 * BLOCK * DIM, generator=generator)
        self.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=dtype)
        self.impl = self

    def do_kv_cache_update(
        self,
        layer: FakeLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        flat = kv_cache.view(kv_cache.shape[0], HEADS, -1)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, BLOCK)
            for part, tensor in enumerate((key, value)):
                first = (part * BLOCK + offset) * DIM
                flat[block][:, self.order[first : first + DIM]] = tensor[token]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_written_at_any_offset_is_read_back_bit_for_bit(dtype: torch.dtype) -> None:
    rng = random.Random(7)
    layers = {f"layer.{index}": FakeLayer(1, dtype) for index in range(LAYERS)}
    cache = PagedCache(layers, torch.device("cpu"))
    blocks = rng.sample(range(BLOCKS), 5)
    whole = torch.randn(LAYERS, 2, 5 * BLOCK, HEADS, DIM).to(dtype)
    bounds = [0, 5, 37, 64, 131, 160]
    for start, end in itertools.pairwise(bounds):
        cache.write(whole[:, :, start:end], cache.slots(blocks, start, end))
    for start, end in [(0, 160), (3, 9), (31, 33), (64, 96), (100, 160)]:
        assert torch.equal(cache.read(blocks, start, end), whole[:, :, start:end])


def test_layers_of_different_shapes_are_refused() -> None:
    narrow = FakeLayer(1, torch.bfloat16)
    wide = FakeLayer(1, torch.bfloat16)
    wide.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, 4 * DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="differ"):
        PagedCache({"a": narrow, "b": wide}, torch.device("cpu"))
