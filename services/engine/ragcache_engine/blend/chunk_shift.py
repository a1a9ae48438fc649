"""Shifts the KV of reused chunks by what their recomputed tokens have changed, inside a pass.

A hook before the write of each layer's KV compares the new KV with the loaded KV, and adds the
shift to all tokens of the chunks in place. The write then replaces the recomputed ones. Attention
of the same layer reads both. Keys are compared and shifted without their rotation, because the
change does not depend on the position.
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
            for one in shifts:
                one.apply(index, key, value)
            update(layer, key, value, kv_cache, slots)

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
        recomputed: Positions of the rows; int64.
        start: The first shifted position. All positions from there to the last one are added to.
        chunk_of: The chunk of each of them, as a row of ``weights``. The last row is of tokens that
            are not shifted.
        weights: What each recomputed token adds to the shift of each chunk; float32
            [chunks + 1, recomputed].
    """

    cache: PagedCache
    blocks: Sequence[int]
    rows: slice
    recomputed: torch.Tensor
    start: int
    chunk_of: torch.Tensor
    weights: torch.Tensor
    angles_recomputed: _Angles
    angles_shifted: _Angles

    @classmethod
    def of(
        cls, one: PromptSlice, plan: ShiftPlan, rows: int, cache: PagedCache, rope: Rope
    ) -> _SliceShift:
        """Prepare the shift of a slice whose first row is ``rows`` before the pass's end."""
        device = cache.device
        recomputed = torch.tensor([p for run in one.runs for p in run], dtype=torch.int64)
        start, end = int(plan.positions[0]), int(plan.positions[-1]) + 1
        unshifted = len(plan.weights)
        chunk_of = torch.full((end - start,), unshifted, dtype=torch.int64)
        chunk_of[torch.from_numpy(plan.positions) - start] = torch.from_numpy(plan.chunk_of)
        weights = torch.zeros(unshifted + 1, len(recomputed))
        weights[:unshifted] = torch.from_numpy(plan.weights)
        return cls(
            cache=cache,
            blocks=one.blocks,
            rows=slice(-rows, one.num_tokens - rows or None),
            recomputed=recomputed,
            start=start,
            chunk_of=chunk_of.to(device),
            weights=weights.to(device),
            angles_recomputed=_Angles.of(recomputed, rope, device),
            angles_shifted=_Angles.of(torch.arange(start, end), rope, device),
        )

    def apply(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Shift a layer's chunks, just before a pass writes its new keys and values."""
        keys, values = self.cache.tokens_at(index, self.blocks, self.recomputed)
        new_keys, new_values = (rows[self.rows].view(keys.shape).float() for rows in (key, value))
        key_changes = self.angles_recomputed.unrotated(new_keys - keys.float())
        value_changes = new_values - values.float()
        key_shift, value_shift = (
            torch.einsum("cn,nhd->chd", self.weights, changes)[self.chunk_of]
            for changes in (key_changes, value_changes)
        )
        key_shift = self.angles_shifted.rotated(key_shift).to(key.dtype)
        value_shift = value_shift.to(value.dtype)
        self.cache.add(index, self.blocks, self.start, key_shift, value_shift)


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
