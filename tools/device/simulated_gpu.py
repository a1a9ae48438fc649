"""A GPU whose memory is the host's, which counts what a real one would be asked to do.

Its tensors are on the device ``meta``, for torch and for the code that uses them. Each operation on
them runs at once on the CPU, so the numbers are right, and counts as one launch. What would make
the calling thread wait for a real GPU counts as a host wait. Mixing both memories in one operation
is an error, as on a GPU.

Triton's interpreter runs kernels (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ragcache_engine.kv_cache import host_memory
from ragcache_engine.kv_cache.device_event import DeviceEvent

DEVICE: Final = torch.device("meta")

_WAITING: Final = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)
"""Operations whose result the host needs, or whose result's size depends on the data."""

_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})
_OURS: Final = ("ragcache_", "/tools/device/stages/")
_Operation = Callable[..., Any]


@dataclass(slots=True)
class Work:
    """What a step asked of the device.

    Attributes:
        launches: Kernels, by the name of the operation.
        copies: Between host and device.
        host_waits: By the operation and the line of code that asked for it.
    """

    launches: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    host_waits: Counter[str] = field(default_factory=Counter)


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated GPU. ``stored`` has its numbers."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        """Wrap a CPU tensor."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.stored = inner
        return made

    def data_ptr(self) -> int:
        """Return the address of the numbers."""
        return self.stored.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse work outside of the simulation, for example on another thread."""
        raise RuntimeError(f"{operation} on device memory outside of the simulated GPU")


class SimulatedGpu(TorchDispatchMode):
    """The device, while the context is open. Only the thread that opened it uses the device.

    Attributes:
        work: What the device was asked to do so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._running: list[DeviceEvent] = []

    def take_work(self) -> Work:
        """Return what the device was asked to do since the last call."""
        work, self.work = self.work, Work()
        return work

    def finish(self) -> None:
        """Do all work that was submitted. Events are complete only then."""
        self._running.clear()

    def add_event(self, event: DeviceEvent) -> None:
        """Add an event that ``finish`` completes."""
        self._running.append(event)

    def is_complete(self, event: DeviceEvent) -> bool:
        """Tell whether an event is complete."""
        return not any(one is event for one in self._running)

    def pinned(self, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory, on any thread."""
        return self._pin(torch.empty(tuple(dims), dtype=dtype))

    def kernel(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """Run a function of CPU tensors as one launch on their counterparts here."""
        self.work.launches[name] += 1
        with _disable_current_modes():
            found = run(*tree_map(_inner, args))
        return tree_map(_outer, found)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor into the device's memory. This counts as nothing."""
        return DeviceTensor(tensor)

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor of the device. This counts as nothing."""
        found: torch.Tensor = _inner(tensor)
        return found

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation of torch."""
        kwargs = dict(kwargs or {})
        name: str = operation._schema.name.removeprefix("aten::")
        device = torch.device(kwargs.get("device") or "cpu")
        is_here = device.type == DEVICE.type
        used = [one for one in (*args, *kwargs.values()) if isinstance(one, DeviceTensor)]
        used += [
            one
            for many in args
            if isinstance(many, list | tuple)
            for one in many
            if isinstance(one, DeviceTensor)
        ]
        if name in ("is_pinned", "_pin_memory"):
            return self._pinning(name, args[0])
        if name == "_to_copy" and (is_here or used):
            return self._to_copy(operation, args, kwargs, used)
        if name == "copy_" and used:
            return self._copy(args, kwargs)
        if used:
            return self._run(name, operation, args, kwargs, used)
        pin = kwargs.pop("pin_memory", False)
        if is_here:
            kwargs["device"] = torch.device("cpu")
            if not name.startswith("empty"):
                self.work.launches[name] += 1
            return DeviceTensor(operation(*args, **kwargs))
        made = operation(*args, **kwargs)
        return self._pin(made) if pin else made

    def wait(self, what: str) -> None:
        """Count a host wait."""
        self.work.host_waits[f"{what} at {_caller()}"] += 1

    def _pinning(self, name: str, tensor: torch.Tensor) -> bool | torch.Tensor:
        if name == "is_pinned":
            return not isinstance(tensor, DeviceTensor) and self._is_pinned(tensor)
        return self._pin(tensor.clone(memory_format=torch.contiguous_format))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _to_copy(self, operation: Any, args: Any, kwargs: Any, used: list[Any]) -> Any:
        to = torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
        if to.type == "cpu":
            self._cross("copy to the host", args[0], None, wait=not non_blocking)
        elif not used:
            wait = not (non_blocking and self._is_pinned(args[0]))
            self._cross("copy to the device", args[0], args[0], wait=wait)
        else:
            self.work.launches["_to_copy"] += 1
        kwargs["device"] = torch.device("cpu")
        # A copy, even if nothing changes.
        made = operation(_inner(args[0]), **kwargs)
        if to.type == "cpu":
            return self._pin(made) if non_blocking else made
        return DeviceTensor(made)

    def _copy(self, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self.work.launches["copy_"] += 1
        else:
            to_host = isinstance(source, DeviceTensor)
            host, what = (target, "copy to the host") if to_host else (source, "copy to the device")
            wait = not (non_blocking and self._is_pinned(host))
            self._cross(what, source, host, wait=wait)
            if not target.is_contiguous():
                self.work.launches["copy_"] += 1
        _inner(target).copy_(_inner(source))
        return target

    def _cross(
        self, what: str, source: torch.Tensor, host: torch.Tensor | None, *, wait: bool
    ) -> None:
        """Count a copy between the memories."""
        self.work.copies += 1
        if not source.is_contiguous() and isinstance(source, DeviceTensor):
            self.work.launches["contiguous"] += 1
        elif not source.is_contiguous():
            wait = True  # torch makes a contiguous copy first, in memory that is not pinned
        if wait:
            self.wait(what)

    def _run(self, name: str, operation: Any, args: Any, kwargs: Any, used: list[Any]) -> Any:
        if name in _WAITING and not (name == "repeat_interleave" and "output_size" in kwargs):
            self.wait(name)
        elif name in _INDEXING:
            self._check_indices(name, args[1])
        self._check_memory(name, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        found = operation(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if not operation.is_view and name not in ("detach", "empty_like", "new_empty"):
            self.work.launches[name] += 1
        known = {id(one.stored): one for one in used}
        return tree_map(lambda one: known.get(id(one), _outer(one)), found)

    def _check_indices(self, name: str, indices: Any) -> None:
        for index in indices:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                self.wait(f"{name} by a mask")
            if not isinstance(index, DeviceTensor):
                self._cross("index in host memory", index, index, wait=True)

    def _check_memory(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _INDEXING:
            args = (args[0], *args[2:])
        for one in (*args, *kwargs.values()):
            is_host = isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor)
            if is_host and one.dim():
                raise RuntimeError(f"{name} of tensors of both memories at {_caller()}")


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Simulate a GPU for the calling thread."""
    gpu, owner = SimulatedGpu(), threading.get_ident()
    make, wait = DeviceEvent.__init__, DeviceEvent.wait

    def made(event: DeviceEvent, device: torch.device, *rest: Any) -> None:
        make(event, device, *rest)
        if threading.get_ident() == owner:
            gpu.add_event(event)

    def waiting(event: DeviceEvent) -> None:
        if threading.get_ident() == owner and not gpu.is_complete(event):
            gpu.wait("event")
        wait(event)

    with (
        mock.patch.object(DeviceEvent, "__init__", made),
        mock.patch.object(DeviceEvent, "is_complete", property(gpu.is_complete)),
        mock.patch.object(DeviceEvent, "wait", waiting),
        mock.patch.object(host_memory, "empty_pinned", gpu.pinned),
        # In inference mode torch refuses views of tensors like these.
        mock.patch.object(torch, "inference_mode", torch.no_grad),
        _interpreted_kernels(gpu),
        gpu,
    ):
        yield gpu


@contextmanager
def _interpreted_kernels(gpu: SimulatedGpu) -> Iterator[None]:
    """Give Triton's interpreter the numbers of the device's tensors."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415

    run = InterpretedFunction.run

    def counted(kernel: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
        gpu.work.launches[kernel.__name__] += 1
        with _disable_current_modes():
            run(kernel, *tree_map(_inner, args), grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", counted):
        yield


def _inner(one: Any) -> Any:
    return one.stored if isinstance(one, DeviceTensor) else one


def _outer(one: Any) -> Any:
    return DeviceTensor(one) if isinstance(one, torch.Tensor) else one


def _caller() -> str:
    """Return the innermost line of the project's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _OURS):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
