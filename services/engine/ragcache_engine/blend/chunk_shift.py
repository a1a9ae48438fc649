"""Shifts the KV of reused chunks by what their recomputed tokens have changed, inside a pass.

A hook around the write of each layer's KV compares the new KV with the loaded KV, and also writes
the shifted KV. Attention of the same layer then reads both. Keys are compared and shifted without
their rotation, because the change does not depend on the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ragcache_core.blend.chunk_shift import ShiftPlan, plan_shift
from ragcache_engine.kv_cache.block_packing import Offsets, PackedCache
from ragcache_engine.kv_cache.host_memory import upload
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import PromptSlice
from ragcache_kv.codecs.numbers import NUMBERS, Bits, Floats
from ragcache_kv.rotation import Pairing, Rope

_UPDATE = "do_kv_cache_update"
"""The method of an attention backend that writes a layer's KV into the paged cache."""

_Kernel = Callable[..., None]

_Located = tuple[Offsets, Offsets]
"""Offsets of some tokens' keys, and of their values."""

_Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values of a layer to slots."""


class _SliceShift(Protocol):
    """The shift of one slice's chunks."""

    def shift(self, index: int, key: torch.Tensor, value: torch.Tensor, write: _Write) -> None:
        """Shift a layer's tokens, just before a pass writes its new ones.

        Args:
            index: The layer.
            key: New keys of all rows of the pass.
            value: New values.
            write: Writes to the layer's cache.
        """


class ChunkShift:
    """Shifts chunks while slices of prompts are recomputed. For the worker's main thread only.

    Args:
        cache: The paged cache with the loaded chunks.
        rope: The rotation of the model's keys.
    """

    def __init__(self, cache: PagedCache, rope: Rope) -> None:
        self._cache = cache
        self._rope = rope
        self._packed = cache.packed() if cache.device.type == "cpu" else None

    def warm_up(self) -> None:
        """Compile what the device needs. It takes a second or two."""
        if self._packed is not None:
            self._kernel()

    @contextmanager
    def attached(self, slices: Sequence[PromptSlice]) -> Iterator[None]:
        """Shift the chunks of the slices in the pass that runs while the context is open.

        Args:
            slices: Their rows are the last ones of the pass, in this order.
        """
        shifts = list(self._shifts(slices))
        with ExitStack() as stack:
            for index, layer in enumerate(self._cache.layers if shifts else ()):
                if hasattr(layer.impl, _UPDATE):
                    stack.enter_context(self._attached_to(index, layer.impl, shifts))
            yield

    def _shifts(self, slices: Sequence[PromptSlice]) -> Iterator[_SliceShift]:
        rows = sum(one.num_tokens for one in slices)
        for one in slices:
            plan = plan_shift(one.chunks, one.runs, one.shifted_runs)
            if plan is not None:
                of_pass = slice(-rows, one.num_tokens - rows or None)
                yield self._slice_shift(one, plan, of_pass)
            rows -= one.num_tokens

    def _slice_shift(self, one: PromptSlice, plan: ShiftPlan, rows: slice) -> _SliceShift:
        if self._packed is None:
            return _TorchShift.of(one, plan, rows, self._cache, self._rope)
        recomputed = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
        shifted = torch.from_numpy(plan.positions)

        def located(positions: torch.Tensor) -> _Located:
            assert self._packed is not None
            blocks, in_block = self._cache.kernel_slots(one.blocks, positions)
            return self._packed.offsets(blocks.numpy(), in_block.numpy())

        ropes, table_of = self._rope.tables
        return _CompiledShift(
            kernel=self._kernel(),
            packed=self._packed,
            rows=rows,
            weights=plan.weights,
            chunk_of=plan.chunk_of,
            recomputed=located(recomputed),
            shifted=located(shifted),
            angles=[
                (_cos_sin(recomputed.numpy(), rope), _cos_sin(shifted.numpy(), rope))
                for rope in ropes
            ],
            table_of=table_of,
            pairs=_pairs(self._rope),
        )

    def _kernel(self) -> _Kernel:
        # Imported here: vLLM 0.32 looks through all loaded modules when it starts a worker, and
        # stumbles over llvmlite's.
        from ragcache_engine.blend.shift_kernel import shift_kernel  # noqa: PLC0415

        number = NUMBERS[str(self._cache.shape.dtype).removeprefix("torch.")]
        return shift_kernel(number, self._rope.rotary_dim // 2, self._rope.head_dim)

    @contextmanager
    def _attached_to(self, index: int, impl: Any, shifts: Sequence[_SliceShift]) -> Iterator[None]:
        update, outer = getattr(impl, _UPDATE), vars(impl).get(_UPDATE)

        def shift_and_update(
            layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slots: torch.Tensor
        ) -> None:
            def write(keys: torch.Tensor, values: torch.Tensor, to: torch.Tensor) -> None:
                update(layer, keys, values, kv_cache, to)

            for one in shifts:
                one.shift(index, key, value, write)
            write(key, value, slots)

        setattr(impl, _UPDATE, shift_and_update)
        try:
            yield
        finally:
            if outer is None:
                delattr(impl, _UPDATE)
            else:
                setattr(impl, _UPDATE, outer)


@dataclass(frozen=True, slots=True)
class _CompiledShift:
    """The shift of one slice's chunks in a packed cache.

    Attributes:
        rows: The slice's rows of the pass, counted from its end.
        weights: What each recomputed token adds to the shift of each chunk.
        chunk_of: The chunk of each shifted token.
        recomputed: The recomputed tokens.
        shifted: The shifted tokens.
        angles: Cosines and sines of both, for each distinct rotation.
        table_of: Index of each layer's rotation; one entry if all layers share it.
        pairs: int64 [2, rotary_dim / 2].
    """

    kernel: _Kernel
    packed: PackedCache
    rows: slice
    weights: Floats
    chunk_of: NDArray[np.int64]
    recomputed: _Located
    shifted: _Located
    angles: Sequence[tuple[Floats, Floats]]
    table_of: Sequence[int]
    pairs: NDArray[np.int64]

    def shift(self, index: int, key: torch.Tensor, value: torch.Tensor, write: _Write) -> None:
        """The kernel writes to the cache itself."""
        of_recomputed, of_shifted = self.angles[self.table_of[index % len(self.table_of)]]
        self.kernel(
            self.packed.layers[index],
            (*self.recomputed, of_recomputed),
            (self._bits(key), self._bits(value)),
            self.weights,
            (*self.shifted, of_shifted, self.chunk_of),
            (self.pairs, *self.packed.dims, self.packed.head_stride),
        )

    def _bits(self, rows: torch.Tensor) -> Bits:
        """Return the slice's rows as bit patterns [recomputed, heads, head_dim]."""
        dim = len(self.packed.dims[0])
        unsigned = self.packed.layers[0].dtype
        integer = torch.int32 if unsigned.itemsize == 4 else torch.int16
        of_slice = rows[self.rows].reshape(self.weights.shape[1], -1, dim).contiguous()
        return of_slice.view(integer).numpy().view(unsigned)


@dataclass(frozen=True, slots=True)
class _TorchShift:
    """The shift of one slice's chunks on a GPU.

    Attributes:
        rows: The slice's rows of the pass, counted from its end.
        of_block: Blocks of the rows' tokens, and after them those of the shifted tokens; int64.
        offsets: Offsets of these tokens in their blocks.
        chunk_of: The chunk of each shifted token, as a row of ``weights``.
        weights: What each recomputed token adds to the shift of each chunk; float32
            [chunks, recomputed].
        slots: Of the shifted tokens.
        angles: Rotations of the recomputed and of the shifted tokens, for each distinct rotation.
        table_of: Index of each layer's rotation; one entry if all layers share it.
    """

    cache: PagedCache
    rows: slice
    of_block: torch.Tensor
    offsets: torch.Tensor
    chunk_of: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    angles: Sequence[tuple[_Angles, _Angles]]
    table_of: Sequence[int]

    @classmethod
    def of(
        cls, one: PromptSlice, plan: ShiftPlan, rows: slice, cache: PagedCache, rope: Rope
    ) -> _TorchShift:
        """Prepare the shift of a slice."""
        size = cache.shape.block_size
        recomputed = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
        shifted = torch.from_numpy(plan.positions)
        table = torch.tensor(one.blocks, dtype=torch.int64)
        ropes, table_of = rope.tables
        # Together, so that the device gets them in one copy.
        of_block, offsets, chunk_of, weights, slots, *angles = upload(
            [
                *cache.kernel_slots(one.blocks, torch.cat([recomputed, shifted])),
                torch.from_numpy(plan.chunk_of),
                torch.from_numpy(plan.weights),
                table[shifted // size] * size + shifted % size,
                *(
                    tensor
                    for one_rope in ropes
                    for positions in (recomputed, shifted)
                    for tensor in _angles(positions, one_rope)
                ),
            ],
            cache.device,
        )
        return cls(
            cache=cache,
            rows=rows,
            of_block=of_block,
            offsets=offsets,
            chunk_of=chunk_of,
            weights=weights,
            slots=slots,
            angles=[
                (_Angles(*angles[start : start + 3]), _Angles(*angles[start + 3 : start + 6]))
                for start in range(0, len(angles), 6)
            ],
            table_of=table_of,
        )

    def shift(self, index: int, key: torch.Tensor, value: torch.Tensor, write: _Write) -> None:
        count = self.weights.shape[1]
        keys, values = self.cache.tokens_at(index, self.of_block, self.offsets)
        keys, values = keys.float(), values.float()
        shape = (count, *keys.shape[1:])
        new_keys, new_values = (rows[self.rows].view(shape).float() for rows in (key, value))
        of_recomputed, of_shifted = self.angles[self.table_of[index % len(self.table_of)]]
        key_changes = of_recomputed.unrotated(new_keys - keys[:count])
        value_changes = new_values - values[:count]
        key_shift, value_shift = (
            torch.einsum("cn,nhd->chd", self.weights, changes)[self.chunk_of]
            for changes in (key_changes, value_changes)
        )
        write(
            (keys[count:] + of_shifted.rotated(key_shift)).to(key.dtype),
            (values[count:] + value_shift).to(value.dtype),
            self.slots,
        )


@dataclass(frozen=True, slots=True)
class _Angles:
    """Rotations of keys at some positions, by dimension of a head.

    Attributes:
        cos: Factor of each dimension; float32 [positions, 1, head_dim].
        sin: Factor of each dimension's partner, with its sign.
        partner: The other dimension of each one's pair; int64 [head_dim].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor

    def rotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys, float32 [positions, heads, head_dim], to their positions."""
        return torch.addcmul(keys * self.cos, keys.index_select(-1, self.partner), self.sin)

    def unrotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys back to position 0."""
        partners = keys.index_select(-1, self.partner)
        return torch.addcmul(keys * self.cos, partners, self.sin, value=-1)


def _angles(positions: torch.Tensor, rope: Rope) -> Iterator[torch.Tensor]:
    """Yield the tensors of ``_Angles`` for positions, on the CPU."""
    one, other = _pairs(rope)
    cosines, sines = _cos_sin(positions.numpy(), rope).transpose(1, 0, 2)
    cos = np.ones((len(positions), 1, rope.head_dim), dtype=np.float32)
    sin = np.zeros_like(cos)
    partner = np.arange(rope.head_dim)
    cos[:, 0, one] = cos[:, 0, other] = cosines
    sin[:, 0, other] = sines
    sin[:, 0, one] = -sines
    partner[one], partner[other] = other, one
    yield from map(torch.from_numpy, (cos, sin, partner))


def _pairs(rope: Rope) -> NDArray[np.int64]:
    """Return the dimensions of each pair that the model rotates; int64 [2, rotary_dim / 2]."""
    half = rope.rotary_dim // 2
    if rope.pairing is Pairing.HALVES:
        return np.stack([np.arange(half), np.arange(half, 2 * half)])
    return np.stack([np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)])


def _cos_sin(positions: NDArray[np.int64], rope: Rope) -> Floats:
    """Return cosines and sines of positions; float32 [positions, 2, rotary_dim / 2].

    The angles are float64, as in ``ragcache_kv.rotation``.
    """
    angles = np.outer(positions, np.array(rope.frequencies))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
