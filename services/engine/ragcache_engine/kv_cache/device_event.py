"""An event in the work queue of the engine's device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class DeviceEvent:
    """Completes when the device has done all work that was submitted before the event.

    To record an event does not wait: a GPU keeps working while the engine prepares the next step.

    Args:
        device: The device.
        clock: Returns seconds, for a device that works synchronously.
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
        """Whether the event is complete, so that ``wait`` would return at once.

        Also after an error of the device, which does no more work: what reads its result raises.
        """
        if self._event is None:
            return True
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Block the calling thread until the event is complete."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the seconds from an earlier event of the same device; waits for this event."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
