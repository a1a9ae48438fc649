"""Requests that decode while another one begins: how long do they wait for a token?"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tools.device.engine import InProcessEngine
from tools.device.report import require

PROMPT_TOKENS: Final = 48
WARM_UP_STEPS: Final = 12
STEPS_AROUND: Final = 4
"""Steps before a request is added, and after its answer."""

# CUDA calls in which the calling thread waits for the GPU, and reads of single numbers.
WAITS: Final = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
    "aten::item",
    "aten::_local_scalar_dense",
)
LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
COPIES: Final = ("cudaMemcpyAsync",)


class Decoding:
    """Some requests that decode until ``close``."""

    def __init__(self, engine: InProcessEngine, count: int, max_tokens: int) -> None:
        self._engine = engine
        self._times_s: list[float] = []
        self._requests = {
            engine.start([20 + number + i for i in range(PROMPT_TOKENS)], max_tokens=max_tokens)
            for number in range(count)
        }
        self.run(WARM_UP_STEPS)

    def close(self) -> None:
        """Abort the requests."""
        for request in self._requests:
            self._engine.abort(request)
        self._engine.run_until(self._engine.is_idle, "aborted requests did not end")

    def run(self, count: int) -> None:
        """Run steps until the requests have so many more tokens each."""
        until = len(self._times_s) + count
        while len(self._times_s) < until:
            self.step()

    def step(self) -> list[Any]:
        """Run one step, and note when the requests got a token."""
        outputs = self._engine.step()
        ours = [output for output in outputs if output.request_id in self._requests]
        if ours:
            self._times_s.append(time.perf_counter())
            require(not any(one.finished for one in ours), "a decoding request ended too early")
        return outputs

    def answer(self, token_ids: Sequence[int], plan: Any) -> None:
        """Answer one more request with one token, and run some steps before and after it."""
        self.run(STEPS_AROUND)
        request = self._engine.start(token_ids, plan, max_tokens=1)
        while not any(one.request_id == request and one.finished for one in self.step()):
            pass
        self.run(STEPS_AROUND)

    def take_gaps_s(self) -> list[float]:
        """Return the seconds between two tokens since the last call."""
        times, self._times_s = self._times_s, []
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def profile(self, num_steps: int, token_ids: Sequence[int], plan: Any) -> dict[str, Any]:
        """Count waits, copies and launches in steps from the arrival of a request on.

        Args:
            num_steps: How many steps.
            token_ids: The request's prompt. Empty: no request arrives.
            plan: Its plan, or None.
        """
        import torch  # noqa: PLC0415  slow to import
        from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.run(STEPS_AROUND)
        with profile(activities=activities) as profiled:
            if token_ids:
                self._engine.start(token_ids, plan, max_tokens=1)
            for _ in range(num_steps):
                self.step()
        counts: Counter[str] = Counter()
        for event in profiled.key_averages():
            counts[event.key] += event.count
        self.run(STEPS_AROUND)
        return {
            "waits": {name: counts[name] for name in WAITS if counts[name]},
            "copies": sum(counts[name] for name in COPIES),
            "launches": sum(counts[name] for name in LAUNCHES),
        }


@contextlib.contextmanager
def decoding(engine: InProcessEngine, count: int, max_tokens: int) -> Iterator[Decoding]:
    """Let requests decode, and abort them at the end."""
    others = Decoding(engine, count, max_tokens)
    try:
        yield others
    finally:
        others.close()
