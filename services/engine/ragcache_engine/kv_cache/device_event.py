"""A moment in the work of the engine's device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class DeviceEvent:
    """When the device has done all that it was told to until now.

    To make one waits for nothing: a GPU works while the next step is prepared, and must not stand
    still so that somebody can look at the clock. clock: seconds, of a device that works at once.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._event: torch.cuda.Event | None = None
        self._at = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at = clock()

    @property
    def is_complete(self) -> bool:
        """Whether it is over, so that nobody need wait for it."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it has come; for a thread that has nothing else to do."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Seconds from an earlier moment of the same device; waits until this one has come."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
