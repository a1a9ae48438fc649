"""Shifts the KV of reused chunks by what their recomputed tokens have changed, inside a pass.

A hook around the write of each layer's KV reads the loaded KV, and writes the shifted KV after it.
Attention of the same layer then reads both the recomputed and the shifted tokens. Keys are compared
and shifted without their rotation, because the change does not depend on the position.
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
            plan = plan_shift(one.chunks, one.runs)
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
        first, end: The positions that are read.
        recomputed, others: Indices of positions among those that are read.
        slots: Of the shifted tokens.
    """

    cache: PagedCache
    blocks: Sequence[int]
    rows: slice
    first: int
    end: int
    recomputed: torch.Tensor
    others: torch.Tensor
    chunk_of: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    angles_recomputed: _Angles
    angles_others: _Angles

    @classmethod
    def of(
        cls, one: PromptSlice, plan: ShiftPlan, rows: int, cache: PagedCache, rope: Rope
    ) -> _SliceShift:
        """Prepare the shift of a slice whose first row is ``rows`` before the pass's end."""
        device = cache.device
        recomputed = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
        others = torch.from_numpy(plan.positions)
        used = torch.from_numpy(plan.weights.any(0))  # a run may be in a chunk that is not shifted
        first = int(min(recomputed[used].min(), others.min()))
        end = int(max(recomputed[used].max(), others.max())) + 1
        size = cache.shape.block_size
        table = torch.tensor(one.blocks, dtype=torch.int64)
        slots = table[others // size] * size + others % size
        last_row = one.num_tokens - rows or None
        return cls(
            cache=cache,
            blocks=one.blocks,
            rows=slice(-rows, last_row),
            first=first,
            end=end,
            recomputed=(recomputed.clamp(first, end - 1) - first).to(device),
            others=(others - first).to(device),
            chunk_of=torch.from_numpy(plan.chunk_of).to(device),
            weights=torch.from_numpy(plan.weights).to(device),
            slots=slots.to(device),
            angles_recomputed=_Angles.of(recomputed, rope, device),
            angles_others=_Angles.of(others, rope, device),
        )

    def shifted(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's shifted keys and values, just before a pass writes its new ones."""
        keys, values = self.cache.layer(index, self.blocks, self.first, self.end)
        shape = (-1, *keys.shape[1:])
        new_keys, new_values = (rows[self.rows].view(shape).float() for rows in (key, value))
        changed = self.angles_recomputed.unrotated(new_keys - keys[self.recomputed].float())
        by_chunk = torch.einsum("cn,nhd->chd", self.weights, changed)
        shift = self.angles_others.rotated(by_chunk[self.chunk_of])
        changed = new_values - values[self.recomputed].float()
        by_chunk = torch.einsum("cn,nhd->chd", self.weights, changed)
        return (
            (keys[self.others].float() + shift).to(key.dtype),
            (values[self.others].float() + by_chunk[self.chunk_of]).to(value.dtype),
        )


@dataclass(frozen=True, slots=True)
class _Angles:
    """Cosines and sines of positions, float32 [positions, 1, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    rope: Rope

    @classmethod
    def of(cls, positions: torch.Tensor, rope: Rope, device: torch.device) -> _Angles:
        """Compute the angles in float64, as ``ragcache_kv.rotation`` does."""
        angles = np.outer(positions.numpy(), np.array(rope.frequencies))[:, None]
        cos, sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        return cls(cos.to(device), sin.to(device), rope)

    def rotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys, float32 [positions, heads, head_dim], to their positions."""
        return self._turned(keys, self.sin)

    def unrotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys back to position 0."""
        return self._turned(keys, -self.sin)

    def _turned(self, keys: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = self.rope.rotary_dim // 2
        if self.rope.pairing is Pairing.HALVES:
            one, other = slice(0, half), slice(half, 2 * half)
        else:
            one, other = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        turned = keys.clone()
        turned[..., one] = keys[..., one] * self.cos - keys[..., other] * sin
        turned[..., other] = keys[..., other] * self.cos + keys[..., one] * sin
        return turned
