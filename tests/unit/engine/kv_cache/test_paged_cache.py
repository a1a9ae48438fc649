"""The paged cache reads and writes tokens in any order inside its blocks."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_engine.kv_cache.paged_cache import PagedCache

BLOCK, HEADS, DIM, LAYERS, BLOCKS = 32, 2, 16, 3, 9


def in_order(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the offset of each element of a block's keys and values: [2, BLOCK, DIM]."""
    offsets = torch.empty(2 * BLOCK * DIM, dtype=torch.int64)
    packed = torch.cat([keys.reshape(-1), values.reshape(-1)])
    offsets[packed] = torch.arange(2 * BLOCK * DIM)
    return offsets.view(2, BLOCK, DIM)


KEYS = torch.arange(BLOCK * DIM).view(BLOCK, DIM)
VALUES = KEYS + BLOCK * DIM
ORDERS = {
    "as presented": in_order(KEYS, VALUES),
    "keys transposed (vec)": in_order(KEYS.T, VALUES),
    "tiles (amx)": in_order(
        KEYS.view(BLOCK // 16, 16, DIM // 2, 2).transpose(1, 2),
        VALUES.view(BLOCK // 2, 2, DIM // 16, 16).permute(2, 0, 3, 1),
    ),
    "a token's halves apart": in_order(
        torch.stack([KEYS[:, : DIM // 2], VALUES[:, : DIM // 2]]),
        torch.stack([KEYS[:, DIM // 2 :], VALUES[:, DIM // 2 :]]),
    ),
}

BESIDE = torch.arange(2 * BLOCK * DIM).view(BLOCK, 2, DIM).transpose(0, 1)
"""FlashAttention: each token's keys and, right after them, its values."""
ORDERS["keys beside values"] = BESIDE


class FakeLayer:
    """An attention layer whose backend packs keys and values in an order of its own."""

    def __init__(self, offsets: torch.Tensor, dtype: torch.dtype) -> None:
        self.order = offsets.reshape(-1)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_written_at_any_offset_is_read_back_bit_for_bit(
    dtype: torch.dtype, order: str
) -> None:
    rng = random.Random(7)
    layers = {f"layer.{index}": FakeLayer(ORDERS[order], dtype) for index in range(LAYERS)}
    cache = PagedCache(layers, torch.device("cpu"))
    blocks = rng.sample(range(BLOCKS), 5)
    whole = torch.randn(LAYERS, 2, 5 * BLOCK, HEADS, DIM).to(dtype)
    bounds = [0, 5, 37, 64, 131, 160]
    for start, end in itertools.pairwise(bounds):
        cache.write(whole[:, :, start:end], cache.slots(blocks, start, end))
    for start, end in [(0, 160), (3, 9), (31, 33), (64, 96), (100, 160)]:
        assert torch.equal(cache.read(blocks, start, end), whole[:, :, start:end])
        keys, values = cache.layer(1, blocks, start, end)
        assert torch.equal(keys, whole[1, 0, start:end])
        assert torch.equal(values, whole[1, 1, start:end])
        assert torch.equal(cache.keys(1, blocks, start, end), keys)


def test_a_device_reads_keys_and_values_side_by_side() -> None:
    """Test the device's indexing, on the CPU."""
    layers = {f"layer.{index}": FakeLayer(BESIDE, torch.float16) for index in range(LAYERS)}
    cache = PagedCache(layers, torch.device("cpu"))
    cache._packings = None  # as on a device
    blocks = [7, 2, 8, 0]
    whole = torch.randn(LAYERS, 2, 4 * BLOCK, HEADS, DIM).to(torch.float16)
    cache.write(whole, cache.slots(blocks, 0, 4 * BLOCK))
    for start, end in [(0, 128), (3, 9), (31, 33), (64, 96), (100, 128)]:
        assert torch.equal(cache.read(blocks, start, end), whole[:, :, start:end])
        assert torch.equal(cache.keys(1, blocks, start, end), whole[1, 0, start:end])
        assert torch.equal(cache.values(1, blocks, start, end), whole[1, 1, start:end])


class StridedLayer:
    """A layer of FlashAttention: tokens are where the shape says, in memory with ordered axes.

    axes: layers, blocks, heads, tokens of a block ("N") and a head's keys and values ("C"), the
    outermost first. All layers share one tensor.
    """

    def __init__(self, memory: torch.Tensor, axes: str, index: int) -> None:
        presented = memory.permute(*(axes.index(axis) for axis in "LBHNC"))
        self.kv_cache = presented[index]
        self.impl = self

    def do_kv_cache_update(
        self,
        layer: StridedLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        assert kv_cache is self.kv_cache, "the view itself, with its strides, and no copy of it"
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, BLOCK)
            kv_cache[block, :, offset, :DIM] = key[token]
            kv_cache[block, :, offset, DIM:] = value[token]


@pytest.mark.parametrize("start", [0, BLOCK, BLOCK + 5])
def test_a_device_reads_no_tokens_at_all(start: int) -> None:
    """As the first chunk of a prompt is observed: there is no other chunk before it."""
    layers = {"layer": FakeLayer(BESIDE, torch.float32)}
    cache = PagedCache(layers, torch.device("cpu"))
    cache._packings = None  # as on a device
    for tokens in cache.layer(0, [5, 2, 7], start, start):
        assert tokens.shape == (0, HEADS, DIM)


def test_a_device_reads_each_block_table_that_it_is_asked_for() -> None:
    layers = {"layer": FakeLayer(BESIDE, torch.float32)}
    cache = PagedCache(layers, torch.device("cpu"))
    cache._packings = None  # as on a device
    value = torch.randn(1, 2, 2 * BLOCK, HEADS, DIM)
    cache.write(value, cache.slots([5, 2], 0, 2 * BLOCK))
    for blocks, first in (([5], 0), ([2], BLOCK), ([5], 0)):
        expected = value[0, 0, first : first + BLOCK]
        assert torch.equal(cache.keys(0, blocks, 0, BLOCK), expected)


@pytest.mark.parametrize("axes", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BNLHC"])
def test_a_device_reads_memory_whose_axes_are_permuted(axes: str) -> None:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK, "C": 2 * DIM}
    untouched = 99.0
    memory = torch.full([sizes[axis] for axis in axes], untouched, dtype=torch.bfloat16)
    layers = {f"layer.{index}": StridedLayer(memory, axes, index) for index in range(LAYERS)}
    cache = PagedCache(layers, torch.device("meta"))  # a device: its order is not probed
    cache.device = torch.device("cpu")
    blocks = [7, 2, 8, 0]
    whole = torch.randn(LAYERS, 2, 4 * BLOCK, HEADS, DIM).to(torch.bfloat16)
    bounds = [0, 5, 37, 64, 128]
    for start, end in itertools.pairwise(bounds):
        cache.write(whole[:, :, start:end], cache.slots(blocks, start, end))
    for start, end in [(0, 128), (3, 9), (31, 33), (64, 96), (100, 128)]:
        assert torch.equal(cache.read(blocks, start, end), whole[:, :, start:end])
        for index in range(LAYERS):
            assert torch.equal(cache.keys(index, blocks, start, end), whole[index, 0, start:end])
            assert torch.equal(cache.values(index, blocks, start, end), whole[index, 1, start:end])
    # Each number is where the order of the axes puts it, and only there.
    plain = memory.permute(*(axes.index(axis) for axis in "LBNHC"))
    tokens = plain[:, blocks].reshape(LAYERS, 4 * BLOCK, HEADS, 2, DIM)
    assert torch.equal(tokens.permute(0, 3, 1, 2, 4), whole)
    others = [block for block in range(BLOCKS) if block not in blocks]
    assert bool((plain[:, others] == untouched).all())


@pytest.mark.parametrize("seed", range(3))
def test_an_order_without_a_nest_of_loops_is_refused(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = FakeLayer(torch.randperm(2 * BLOCK * DIM, generator=generator), torch.bfloat16)
    with pytest.raises(ValueError, match="block-size"):
        PagedCache({"a": layer}, torch.device("cpu"))


def test_layers_of_different_shapes_are_refused() -> None:
    narrow = FakeLayer(ORDERS["as presented"], torch.bfloat16)
    wide = FakeLayer(ORDERS["as presented"], torch.bfloat16)
    wide.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, 4 * DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="differ"):
        PagedCache({"a": narrow, "b": wide}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("order", "packed"), [(order, True) for order in ORDERS] + [("keys beside values", False)]
)
def test_cut_blocks_hold_the_same_tokens(order: str, packed: bool) -> None:
    """vLLM's block tables have blocks of two of the layers' blocks.

    packed: read by the probed order, as on a CPU, or as a GPU's layers present it.
    """
    layers = {"layer": FakeLayer(ORDERS[order], torch.float32)}
    cache = PagedCache(layers, torch.device("cpu"), 2 * BLOCK)
    if not packed:
        cache._packings = None
    assert cache.shape.block_size == 2 * BLOCK
    blocks = [3, 0, 2]  # of BLOCKS // 2
    whole = torch.randn(1, 2, 6 * BLOCK - 3, HEADS, DIM)
    cut = [6, 7, 0, 1, 4, 5]
    uncut = PagedCache(layers, torch.device("cpu"))
    for start, end in itertools.pairwise([0, 5, 37, 70, 131, whole.shape[2]]):
        part = whole[:, :, start:end].contiguous()
        assert torch.equal(cache.slots(blocks, start, end), uncut.slots(cut, start, end))
        cache.write(part, cache.slots(blocks, start, end))
    assert torch.equal(uncut.read(cut, 0, whole.shape[2]), whole)
    for start, end in [(0, whole.shape[2]), (31, 33), (63, 130), (100, 101)]:
        if packed:
            assert torch.equal(cache.read(blocks, start, end), whole[:, :, start:end])
        keys, values = cache.layer(0, blocks, start, end)
        assert torch.equal(torch.stack([keys, values]), whole[0, :, start:end])


def test_blocks_that_cannot_be_cut_are_refused() -> None:
    layers = {"layer": FakeLayer(ORDERS["as presented"], torch.float32)}
    with pytest.raises(ValueError, match="cannot be cut"):
        PagedCache(layers, torch.device("cpu"), BLOCK + 16)


@pytest.mark.parametrize("order", ORDERS)
def test_single_tokens_are_read(order: str) -> None:
    cache = PagedCache({"layer": FakeLayer(ORDERS[order], torch.float32)}, torch.device("cpu"))
    blocks = [6, 1, 4]
    value = torch.randn(1, 2, 3 * BLOCK, HEADS, DIM)
    cache.write(value, cache.slots(blocks, 0, 3 * BLOCK))
    positions = torch.tensor([0, 5, 31, 32, 70, 95])
    keys, values = cache.tokens_at(0, *cache.kernel_slots(blocks, positions))
    assert torch.equal(keys, value[0, 0, positions])
    assert torch.equal(values, value[0, 1, positions])
