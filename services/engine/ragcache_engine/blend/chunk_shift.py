"""Shifts the KV of reused chunks by what their recomputed tokens have changed, inside a pass.

A hook around the write of each layer's KV compares the new KV with the loaded KV, and also writes
the shifted KV. Attention of the same layer then reads both. Keys are compared and shifted without
their rotation, because the change does not depend on the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragcache_core.blend.chunk_shift import ShiftPlan, plan_shift
from ragcache_engine.blend.prompt_slice import PromptSlice
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import Pairing, Rope

_UPDATE = "do_kv_cache_update"
"""The method of an attention backend that writes a layer's KV into the paged cache."""


class ChunkShift:
    """Shifts chunks while slices of prompts are recomputed. For the worker's main thread only.

    Args:
        cache: The paged cache with the loaded chunks.
        rope: The rotation of the model's keys.
    """

    def __init__(self, cache: PagedCache, rope: Rope) -> None:
        self._cache = cache
        self._rope = rope

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
            plan = plan_shift(one.chunks, one.runs, one.next_runs)
            if plan is not None:
                yield _SliceShift.of(one, plan, rows, self._cache, self._rope)
            rows -= one.num_tokens

    @contextmanager
    def _attached_to(self, index: int, impl: Any, shifts: Sequence[_SliceShift]) -> Iterator[None]:
        update, outer = getattr(impl, _UPDATE), vars(impl).get(_UPDATE)

        def shift_and_update(
            layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slots: torch.Tensor
        ) -> None:
            shifted = [one.shifted(index, key, value) for one in shifts]
            update(layer, key, value, kv_cache, slots)
            for one, (keys, values) in zip(shifts, shifted, strict=True):
                update(layer, keys, values, kv_cache, one.slots)

        setattr(impl, _UPDATE, shift_and_update)
        try:
            yield
        finally:
            if outer is None:
                delattr(impl, _UPDATE)
            else:
                setattr(impl, _UPDATE, outer)


@dataclass(frozen=True, slots=True)
class _SliceShift:
    """The shift of one slice's chunks.

    Attributes:
        rows: The slice's rows of the pass, counted from its end.
        positions: Positions of the rows, and after them those of the shifted tokens; int64.
        chunk_of: The chunk of each shifted token, as a row of ``weights``.
        weights: What each recomputed token adds to the shift of each chunk; float32
            [chunks, recomputed].
        slots: Of the shifted tokens.
    """

    cache: PagedCache
    blocks: Sequence[int]
    rows: slice
    positions: torch.Tensor
    chunk_of: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    angles_recomputed: _Angles
    angles_shifted: _Angles

    @classmethod
    def of(
        cls, one: PromptSlice, plan: ShiftPlan, rows: int, cache: PagedCache, rope: Rope
    ) -> _SliceShift:
        """Prepare the shift of a slice whose first row is ``rows`` before the pass's end."""
        device, size = cache.device, cache.shape.block_size
        recomputed = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
        shifted = torch.from_numpy(plan.positions)
        table = torch.tensor(one.blocks, dtype=torch.int64)
        return cls(
            cache=cache,
            blocks=one.blocks,
            rows=slice(-rows, one.num_tokens - rows or None),
            positions=torch.cat([recomputed, shifted]),
            chunk_of=torch.from_numpy(plan.chunk_of).to(device),
            weights=torch.from_numpy(plan.weights).to(device),
            slots=(table[shifted // size] * size + shifted % size).to(device),
            angles_recomputed=_Angles.of(recomputed, rope, device),
            angles_shifted=_Angles.of(shifted, rope, device),
        )

    def shifted(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's shifted keys and values, just before a pass writes its new ones."""
        count = self.weights.shape[1]
        keys, values = self.cache.tokens_at(index, self.blocks, self.positions)
        keys, values = keys.float(), values.float()
        shape = (count, *keys.shape[1:])
        new_keys, new_values = (rows[self.rows].view(shape).float() for rows in (key, value))
        key_changes = self.angles_recomputed.unrotated(new_keys - keys[:count])
        value_changes = new_values - values[:count]
        key_shift, value_shift = (
            torch.einsum("cn,nhd->chd", self.weights, changes)[self.chunk_of]
            for changes in (key_changes, value_changes)
        )
        return (
            (keys[count:] + self.angles_shifted.rotated(key_shift)).to(key.dtype),
            (values[count:] + value_shift).to(value.dtype),
        )


@dataclass(frozen=True, slots=True)
class _Angles:
    """Rotations of keys at some positions, by dimension of a head.

    Attributes:
        cos: Factor of each dimension; float32 [positions, 1, head_dim].
        sin: Factor of each dimension's partner, with its sign.
        partner: The other dimension of each one's pair; int64 [head_dim]. None: half of the
            dimensions away.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor | None

    @classmethod
    def of(cls, positions: torch.Tensor, rope: Rope, device: torch.device) -> _Angles:
        """Compute the angles in float64, as ``ragcache_kv.rotation`` does."""
        half = rope.rotary_dim // 2
        if rope.pairing is Pairing.HALVES:
            one, other = np.arange(half), np.arange(half, 2 * half)
        else:
            one, other = np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
        angles = np.outer(positions.numpy(), np.array(rope.frequencies))
        cos = np.ones((len(positions), 1, rope.head_dim), dtype=np.float32)
        sin = np.zeros_like(cos)
        partner = np.arange(rope.head_dim)
        cos[:, 0, one] = cos[:, 0, other] = np.cos(angles)
        sin[:, 0, other] = np.sin(angles)
        sin[:, 0, one] = -sin[:, 0, other]
        partner[one], partner[other] = other, one
        arrays = (torch.from_numpy(array).to(device) for array in (cos, sin, partner))
        cosines, sines, partners = arrays
        is_half_away = rope.pairing is Pairing.HALVES and rope.rotary_dim == rope.head_dim
        return cls(cosines, sines, None if is_half_away else partners)

    def rotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys, float32 [positions, heads, head_dim], to their positions."""
        return torch.addcmul(keys * self.cos, self._partners(keys), self.sin)

    def unrotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys back to position 0."""
        return torch.addcmul(keys * self.cos, self._partners(keys), self.sin, value=-1)

    def _partners(self, keys: torch.Tensor) -> torch.Tensor:
        if self.partner is not None:
            return keys.index_select(-1, self.partner)
        one, other = keys.chunk(2, dim=-1)
        return torch.cat((other, one), dim=-1)
