"""The simulated GPU finds what makes a thread wait for a real one, and computes the right bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.host_memory import HostCopy, upload
from tools.device.simulated_gpu import DEVICE, SimulatedGpu, simulated_gpu

NUMBERS = torch.arange(12.0).view(3, 4)

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda there: there[0, 0].item(),
    "float": lambda there: float(there[0, 0]),
    "bool": lambda there: bool(there[0, 0]),
    "cpu": lambda there: there.cpu(),
    "blocking to": lambda there: there.to("cpu"),
    "upload of memory that is not pinned": lambda there: NUMBERS.to(DEVICE, non_blocking=True),
    "blocking upload of pinned memory": lambda there: NUMBERS.pin_memory().to(DEVICE),
    "copy to memory that is not pinned": lambda there: torch.empty(3, 4).copy_(
        there, non_blocking=True
    ),
    "nonzero": lambda there: there.nonzero(),
    "mask": lambda there: there[there > 3],
    "write by a mask": lambda there: there.index_put_((there > 3,), there[0, 0]),
    "index in host memory": lambda there: there[torch.tensor([0, 2])],
    "masked select": lambda there: there.masked_select(there > 3),
    "equal": lambda there: torch.equal(there, there),
    "repeat by numbers on the device": lambda there: there[0].repeat_interleave(
        torch.ones(4, dtype=torch.int64, device=DEVICE)
    ),
    "unique": lambda there: there.unique(),
    "event": lambda there: DeviceEvent(DEVICE).wait(),
}

GOES_ON: dict[str, Callable[[torch.Tensor], object]] = {
    "upload of pinned memory": lambda there: NUMBERS.pin_memory().to(DEVICE, non_blocking=True),
    "upload": lambda there: upload([NUMBERS, torch.arange(3)], DEVICE),
    "copy to the host": HostCopy,
    "index on the device": lambda there: there[torch.ones(2, dtype=torch.int64, device=DEVICE)],
    "sum": lambda there: there.sum(),
    "views": lambda there: there[1:, :2].T.unflatten(0, (2, 1)),
}


def run(work: Callable[[torch.Tensor], object]) -> SimulatedGpu:
    with simulated_gpu() as gpu:
        work(gpu.here(NUMBERS.clone()))
    return gpu


@pytest.mark.parametrize("name", WAITS)
def test_a_host_wait_is_counted(name: str) -> None:
    assert run(WAITS[name]).work.host_waits.total() == 1


@pytest.mark.parametrize("name", GOES_ON)
def test_other_work_is_no_host_wait(name: str) -> None:
    assert not run(GOES_ON[name]).work.host_waits


def test_launches_and_copies_are_counted() -> None:
    def work(there: torch.Tensor) -> None:
        doubled = there[:, 1:] * 2
        HostCopy(doubled.sum())

    counted = run(work).work
    assert (counted.launches, counted.copies) == ({"mul": 1, "sum": 1}, 1)


def test_memories_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="both memories"):
        run(lambda there: there + NUMBERS)


def test_uploaded_tensors_keep_their_numbers_and_come_in_one_copy() -> None:
    given = [torch.arange(5, dtype=torch.int32), NUMBERS, torch.empty(0), torch.tensor([True])]
    with simulated_gpu() as gpu:
        found = [gpu.numbers(one) for one in upload(given, DEVICE)]
    assert gpu.work.copies == 1
    for one, expected in zip(found, given, strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


def test_a_copy_to_the_host_is_complete_when_the_device_has_done_it() -> None:
    with simulated_gpu() as gpu:
        copy = HostCopy(gpu.here(NUMBERS) * 2)
        assert not copy.is_complete
        gpu.finish()
        assert copy.is_complete
    assert torch.equal(copy.take(), NUMBERS * 2)
