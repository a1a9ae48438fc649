"""Leader election on a real API server: two and three replicas, deaths, cuts, clean ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from ragcache_operator.kube.api import Api
from ragcache_operator.kube.lease import LeaseLost, LeaseTiming, run_while_leading
from ragcache_operator.kube.resources import LEASES, Object
from tests.cluster.availability import Unavailable, skip
from tests.cluster.control_plane import ControlPlane, start_control_plane
from tests.helpers.cuttable_connection import CuttableConnection

NAMESPACE = "default"
# A machine that stands still for some seconds loses no lease.
TIMING = LeaseTiming(duration_s=10, renew_deadline_s=8.0, retry_s=0.2)
SOON_S = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        running = start_control_plane(tmp_path_factory.mktemp("plane"))
        with running as plane:
            yield plane
    except Unavailable as reason:
        skip(reason)


class Stage:
    """Where replicas work; two at once are an error."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.history: list[str] = []
        self._changed = asyncio.Condition()

    def work(self, who: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            assert self.at_work == [], f"{who} beside {self.at_work}"
            self.at_work.append(who)
            self.history.append(who)
            async with self._changed:
                self._changed.notify_all()
            try:
                await asyncio.Event().wait()
            finally:
                self.at_work.remove(who)

        return run

    async def somebody_but(self, *others: str) -> str:
        async with asyncio.timeout(SOON_S), self._changed:
            await self._changed.wait_for(
                lambda: bool(self.at_work) and self.at_work[0] not in others
            )
            return self.at_work[0]


async def contend(api: Api, lease: str, who: str, stage: Stage) -> None:
    await run_while_leading(
        api,
        NAMESPACE,
        lease,
        who,
        stage.work(who),
        timing=TIMING,
        jitter=Random(who).random,
    )


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def held(api: Api, lease: str) -> Object:
    found = await api.get(LEASES, lease, NAMESPACE)
    assert found is not None
    spec: Object = found["spec"]
    return spec


async def test_a_clean_end_hands_over_at_once_and_leaves_nobodys_lease(plane: ControlPlane) -> None:
    stage = Stage()
    async with await Api.connect(plane.kubeconfig) as api:
        tasks = {who: asyncio.create_task(contend(api, "clean", who, stage)) for who in "abc"}
        clock = asyncio.get_running_loop().time
        leader = await stage.somebody_but()
        for turn in range(3):
            spec = await held(api, "clean")
            assert (spec["holderIdentity"], spec["leaseTransitions"]) == (leader, turn)
            await stop(tasks.pop(leader))
            given_up_s = clock()
            if tasks:
                leader = await stage.somebody_but(leader)
                assert clock() - given_up_s < TIMING.duration_s, "it had to run out"
        assert (await held(api, "clean"))["holderIdentity"] == ""
    assert sorted(stage.history) == ["a", "b", "c"]


_HOLDER = """
import asyncio, sys
from pathlib import Path
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.lease import Timing, lead

async def run():
    print("leads", flush=True)
    await asyncio.Event().wait()

async def main(kubeconfig, lease):
    async with await Api.connect(Path(kubeconfig)) as api:
        timing = Timing(duration_s=10, renew_deadline_s=8.0, retry_s=0.2)
        await lead(api, "default", lease, "killed", run, timing=timing)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_holder_that_is_killed_is_followed_when_its_lease_runs_out(
    plane: ControlPlane,
) -> None:
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _HOLDER, str(plane.kubeconfig), "killed"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"leads\n"
    stage = Stage()
    async with await Api.connect(plane.kubeconfig) as api:
        tasks = [asyncio.create_task(contend(api, "killed", who, stage)) for who in "ab"]
        await asyncio.sleep(TIMING.duration_s + 2)
        assert stage.at_work == []
        holder.send_signal(signal.SIGKILL)
        await holder.wait()
        last = await held(api, "killed")
        assert last["holderIdentity"] == "killed"
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await stage.somebody_but()
        # Its last renewal was one look ago, or two.
        assert clock() - began_s > TIMING.duration_s - 3 * TIMING.retry_s
        await stop(*tasks)


async def test_a_holder_that_is_cut_off_ends_before_the_next_begins(
    plane: ControlPlane, tmp_path: Path
) -> None:
    stage = Stage()
    async with CuttableConnection.to(plane.url) as line, await Api.connect(plane.kubeconfig) as api:
        behind = tmp_path / "kubeconfig"
        behind.write_text(plane.kubeconfig.read_text().replace(plane.url, line.url))
        async with await Api.connect(behind) as its_api:
            holder = asyncio.create_task(contend(its_api, "cut", "holder", stage))
            assert await stage.somebody_but() == "holder"
            others = [asyncio.create_task(contend(api, "cut", who, stage)) for who in "ab"]
            # A failure shorter than the deadline changes nothing.
            await line.cut()
            await asyncio.sleep(TIMING.renew_deadline_s / 4)
            await line.restore()
            await asyncio.sleep(TIMING.duration_s + 2)
            assert stage.history == ["holder"]
            await line.cut()
            with pytest.raises(LeaseLost, match="could not be renewed for 8 s"):
                await holder
            assert stage.at_work == []
            assert await stage.somebody_but("holder") in "ab"
            await stop(*others)
    assert len(stage.history) == 2 or stage.history[1:] == ["a", "b"]


async def test_a_lease_that_somebody_edits_or_deletes_stays_its_holders(
    plane: ControlPlane,
) -> None:
    stage = Stage()
    async with await Api.connect(plane.kubeconfig) as api:
        tasks = [asyncio.create_task(contend(api, "touched", who, stage)) for who in "abc"]
        holder = await stage.somebody_but()
        patch = {"metadata": {"labels": {"team": "platform"}}}
        await api.merge(LEASES, "touched", NAMESPACE, patch)
        await asyncio.sleep(TIMING.duration_s)
        found = await api.get(LEASES, "touched", NAMESPACE)
        assert found is not None
        assert found["metadata"]["labels"] == {"team": "platform"}
        await api.delete(LEASES, "touched", NAMESPACE)
        await asyncio.sleep(TIMING.duration_s + 2)
        assert stage.history == [holder]
        await stop(*tasks)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records]
    return [message for message in found if "cannot look at lease" in message]


async def test_without_rights_a_replica_waits_and_says_why(
    plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = tmp_path / "kubeconfig"
    nobody.write_text(plane.kubeconfig.read_text().replace(plane.token, "unknown"))
    stage = Stage()
    async with await Api.connect(nobody) as api:
        task = asyncio.create_task(contend(api, "forbidden", "a", stage))
        async with asyncio.timeout(SOON_S):
            while True:
                if said(caplog):
                    break
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        await stop(task)
    assert stage.history == []
    assert len(said(caplog)) == 1, "once, not at every look"
