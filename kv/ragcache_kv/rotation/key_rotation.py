"""Moves post-RoPE keys from one position to another, on the CPU or a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import NUMBERS, Bits
from ragcache_kv.rotation.rope import Rope, cos_sin

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")
_Layout = tuple[int, int, int, int]
"""Groups, halves of each group (keys first), rows of each half, head_dim."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """Rotates the keys of one model, which are stored as dtype (``ValueShape.dtype``).

    Where layers differ in their rotation (``Rope.by_layer``), arrays are whole values: their first
    dimension has all layers, in order.

    Arrays are C-contiguous. They are bit patterns in numpy (``codecs.numbers``: uint16, uint32), or
    tensors of dtype. The tensor's device does the work, a GPU on the current stream. The arithmetic
    is float32 and rounds once, ties to even, so all devices give the same bits. A delta of 0
    changes nothing. The constructor raises ValueError for an unknown dtype.
    """

    rope: Rope
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in NUMBERS:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(NUMBERS)}")

    def of_layers(self, layers: range) -> KeyRotation:
        """Return the rotation of arrays that have these layers only."""
        return KeyRotation(self.rope.of_layers(layers), self.dtype)

    def rotate_part(self, part: Array, delta: int, out: Array | None = None) -> Array:
        """Move the keys of a native part, or of a whole value, by delta tokens.

        Args:
            part: [..., 2, num_tokens, num_kv_heads, head_dim], keys first. The values stay.
            delta: Difference of positions; negative moves back.
            out: An array of the same shape that does not overlap part; None for part itself.

        Returns:
            out.

        Raises:
            ValueError: An array has another shape, dtype or layout.
        """
        shape = tuple(part.shape)
        if len(shape) < 4 or shape[-4] != 2 or shape[-1] != self.rope.head_dim:
            raise ValueError(f"{shape} is not [..., 2, tokens, kv_heads, {self.rope.head_dim}]")
        layout = (math.prod(shape[:-4]), 2, shape[-3] * shape[-2], shape[-1])
        if self.rope.by_layer and layout[0] != len(self.rope.by_layer):
            raise ValueError(f"{shape} has {layout[0]} layers, not {len(self.rope.by_layer)}")
        return self._rotate(part, delta, part if out is None else out, layout)

    def rotate_keys(self, keys: Array, delta: int, out: Array | None = None) -> Array:
        """Move keys, [..., head_dim], as rotate_part does."""
        shape = tuple(keys.shape)
        if self.rope.by_layer:
            raise ValueError("the keys' layer decides how they are rotated (Rope.of_layer)")
        if not shape or shape[-1] != self.rope.head_dim:
            raise ValueError(f"{shape} is not [..., {self.rope.head_dim}]")
        layout = (1, 1, math.prod(shape[:-1]), shape[-1])
        return self._rotate(keys, delta, keys if out is None else out, layout)

    def warm_up(self) -> None:
        """Compile the two CPU kernels. With the import of numba it takes a second or two."""
        keys = np.zeros((1, self.rope.head_dim), NUMBERS[self.dtype].bits)
        of_layer = KeyRotation(self.rope.of_layer(0), self.dtype)
        of_layer.rotate_keys(keys, 1, np.empty_like(keys))
        of_layer.rotate_keys(keys, 1)

    def _rotate(self, given: Array, delta: int, out: Array, layout: _Layout) -> Array:
        if given.shape != out.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, not {tuple(given.shape)}")
        if isinstance(given, np.ndarray) and isinstance(out, np.ndarray):
            self._rotate_array(given, delta, out, layout)
        elif not (isinstance(given, np.ndarray) or isinstance(out, np.ndarray)):
            self._rotate_tensor(given, delta, out, layout)
        else:
            raise ValueError("one array is of numpy and the other of torch")  # noqa: TRY004
        return out

    def _rotate_tensor(
        self, given: torch.Tensor, delta: int, out: torch.Tensor, layout: _Layout
    ) -> None:
        import torch  # noqa: PLC0415  only a caller with tensors needs torch

        dtype = getattr(torch, self.dtype)
        if any(t.dtype != dtype or not t.is_contiguous() for t in (given, out)):
            raise ValueError(f"not a contiguous tensor of {self.dtype}")
        if given.device != out.device:
            raise ValueError(f"out is on {out.device}, not {given.device}")
        if given.device.type != "cpu":
            # Imported here: only machines with a GPU are sure to have Triton.
            from ragcache_kv.rotation import device  # noqa: PLC0415

            device.rotate(given, out, self.rope, delta, layout)
            return
        number = NUMBERS[self.dtype]
        integer = torch.int32 if number.num_bytes == 4 else torch.int16
        before, after = (
            tensor.detach().view(integer).numpy().view(number.bits) for tensor in (given, out)
        )
        self._rotate_array(before, delta, after, layout)

    def _rotate_array(self, given: Bits, delta: int, out: Bits, layout: _Layout) -> None:
        # Imported here: a process that never rotates keys needs no numba.
        from ragcache_kv.rotation import cpu  # noqa: PLC0415

        number = NUMBERS[self.dtype]
        for array in (given, out):
            flags = array.flags
            if array.dtype != number.bits or not (flags.c_contiguous and flags.aligned):
                raise ValueError(f"not a contiguous array of bit patterns of {self.dtype}")
        if not out.flags.writeable:
            raise ValueError("out is read only")
        before, after = given.reshape(layout), out.reshape(layout)
        in_place = _is_same_memory(given, out)
        if not (in_place or (delta and given.flags.writeable)):
            np.copyto(after, before)  # kernels refuse read-only arrays
            in_place = True
        for index, (group, new_group) in enumerate(zip(before, after, strict=True)):
            new_keys = new_group[0]
            if delta:
                keys = new_keys if in_place else group[0]
                rope = self.rope.of_layer(index)
                cpu.rotate(keys, new_keys, cos_sin(rope, delta), rope, number)
            if not in_place:
                np.copyto(new_group[1:], group[1:])


def _is_same_memory(given: Bits, out: Bits) -> bool:
    """Return whether out is given. Raises ValueError if they overlap in part."""
    if not np.may_share_memory(given, out):
        return False
    if given.__array_interface__["data"][0] != out.__array_interface__["data"][0]:
        raise ValueError("out overlaps the rotated keys in part")
    return True
