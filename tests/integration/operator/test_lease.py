"""Leader election on a real API server: clean ends, killed processes and network failures."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.lease import LeaseClaim, LeaseLost, LeaseTiming, run_while_leading
from ragcache_operator.kube.resources import LEASES, Object
from tests.kit.connection import CuttableConnection
from tests.kit.wait import until

NAMESPACE = "default"
# No test machine is so slow that it loses a Lease.
PATIENT = LeaseTiming(duration_s=3600, renew_deadline_s=3000.0, retry_s=0.2)
IMPATIENT = LeaseTiming(duration_s=10, renew_deadline_s=8.0, retry_s=0.2)
SOON_S = 120.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        running = start_control_plane(tmp_path_factory.mktemp("plane"))
        with running as plane:
            yield plane
    except Unavailable as reason:
        skip(reason)


class ActivityLog:
    """Records which replica works. Two at the same time are an error."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.history: list[str] = []
        self._changed = asyncio.Condition()

    def work(self, who: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            assert self.at_work == [], f"{who} and {self.at_work}"
            self.at_work.append(who)
            self.history.append(who)
            async with self._changed:
                self._changed.notify_all()
            try:
                await asyncio.Event().wait()
            finally:
                self.at_work.remove(who)

        return run

    async def other_than(self, *others: str) -> str:
        async with asyncio.timeout(SOON_S), self._changed:
            await self._changed.wait_for(
                lambda: bool(self.at_work) and self.at_work[0] not in others
            )
            return self.at_work[0]


async def contend(
    api: Api, lease: str, who: str, activity: ActivityLog, timing: LeaseTiming = PATIENT
) -> None:
    await run_while_leading(
        api,
        LeaseClaim(NAMESPACE, lease, who),
        activity.work(who),
        timing=timing,
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


async def test_a_clean_end_hands_over_at_once_and_releases_the_lease(plane: ControlPlane) -> None:
    activity = ActivityLog()
    async with await Api.connect(plane.kubeconfig) as api:
        tasks = {who: asyncio.create_task(contend(api, "clean", who, activity)) for who in "abc"}
        leader = await activity.other_than()
        for turn in range(3):
            spec = await held(api, "clean")
            assert (spec["holderIdentity"], spec["leaseTransitions"]) == (leader, turn)
            await stop(tasks.pop(leader))
            if tasks:  # another one leads long before the Lease would expire
                leader = await activity.other_than(leader)
        assert (await held(api, "clean"))["holderIdentity"] == ""
    assert sorted(activity.history) == ["a", "b", "c"]


_HOLDER = """
import asyncio, sys
from pathlib import Path
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.lease import LeaseClaim, LeaseTiming, run_while_leading

async def run():
    print("leads", flush=True)
    await asyncio.Event().wait()

async def main(kubeconfig, lease):
    async with await Api.connect(Path(kubeconfig)) as api:
        timing = LeaseTiming(duration_s=10, renew_deadline_s=8.0, retry_s=0.2)
        await run_while_leading(api, LeaseClaim("default", lease, "killed"), run, timing=timing)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_holder_is_replaced_when_its_lease_expires(
    plane: ControlPlane,
) -> None:
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _HOLDER, str(plane.kubeconfig), "killed"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"leads\n"
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    activity = ActivityLog()
    async with await Api.connect(plane.kubeconfig) as api:
        last = await held(api, "killed")
        assert last["holderIdentity"] == "killed"
        clock = asyncio.get_running_loop().time
        began_s = clock()
        tasks = [
            asyncio.create_task(contend(api, "killed", who, activity, IMPATIENT)) for who in "ab"
        ]
        await activity.other_than()
        assert clock() - began_s >= IMPATIENT.duration_s
        await stop(*tasks)


async def until_renewed(api: Api, lease: str) -> None:
    """Wait until the holder has renewed a Lease several times from now on."""
    for _ in range(3):
        before = (await held(api, lease))["renewTime"]

        async def is_renewed(before: str = before) -> bool:
            return bool((await held(api, lease))["renewTime"] != before)

        await until(is_renewed, "a renewal")


async def test_a_failure_shorter_than_the_deadline_changes_nothing(
    plane: ControlPlane, tmp_path: Path
) -> None:
    activity = ActivityLog()
    async with CuttableConnection.to(plane.url) as line, await Api.connect(plane.kubeconfig) as api:
        proxied = tmp_path / "kubeconfig"
        proxied.write_text(plane.kubeconfig.read_text().replace(plane.url, line.url))
        async with await Api.connect(proxied) as its_api:
            holder = asyncio.create_task(contend(its_api, "failing", "holder", activity))
            assert await activity.other_than() == "holder"
            others = [asyncio.create_task(contend(api, "failing", who, activity)) for who in "ab"]
            await line.cut()
            await asyncio.sleep(2)
            await line.restore()
            await until_renewed(api, "failing")
            assert activity.history == ["holder"]
            await stop(holder, *others)


async def test_a_disconnected_holder_ends_before_the_next_begins(
    plane: ControlPlane, tmp_path: Path
) -> None:
    activity = ActivityLog()
    async with CuttableConnection.to(plane.url) as line, await Api.connect(plane.kubeconfig) as api:
        proxied = tmp_path / "kubeconfig"
        proxied.write_text(plane.kubeconfig.read_text().replace(plane.url, line.url))
        async with await Api.connect(proxied) as its_api:
            holder = asyncio.create_task(contend(its_api, "cut", "holder", activity, IMPATIENT))
            assert await activity.other_than() == "holder"
            others = [
                asyncio.create_task(contend(api, "cut", who, activity, IMPATIENT)) for who in "ab"
            ]
            await line.cut()
            with pytest.raises(LeaseLost, match="could not be renewed for 8 s"):
                await holder
            # It fails to begin to work if the holder still works.
            assert await activity.other_than("holder") in "ab"
            await stop(*others)
    assert activity.history.count("holder") == 1


async def test_an_edited_or_deleted_lease_stays_with_its_holder(
    plane: ControlPlane,
) -> None:
    activity = ActivityLog()
    async with await Api.connect(plane.kubeconfig) as api:
        tasks = [asyncio.create_task(contend(api, "touched", who, activity)) for who in "abc"]
        holder = await activity.other_than()
        patch = {"metadata": {"labels": {"team": "platform"}}}
        await api.merge(LEASES, "touched", NAMESPACE, patch)
        await until_renewed(api, "touched")
        found = await api.get(LEASES, "touched", NAMESPACE)
        assert found is not None
        assert found["metadata"]["labels"] == {"team": "platform"}
        await api.delete(LEASES, "touched", NAMESPACE)

        async def exists() -> bool:
            return await api.get(LEASES, "touched", NAMESPACE) is not None

        await until(exists)
        await until_renewed(api, "touched")
        assert (await held(api, "touched"))["holderIdentity"] == holder
        assert activity.history == [holder]
        await stop(*tasks)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records]
    return [message for message in found if "lease: read failed" in message]


async def test_without_permissions_a_replica_waits_and_logs_why(
    plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown_user = tmp_path / "kubeconfig"
    unknown_user.write_text(plane.kubeconfig.read_text().replace(plane.token, "unknown"))
    activity = ActivityLog()
    async with await Api.connect(unknown_user) as api:
        task = asyncio.create_task(contend(api, "forbidden", "a", activity))
        await until(lambda: said(caplog))
        await asyncio.sleep(1)
        await stop(task)
    assert activity.history == []
    assert len(said(caplog)) == 1, "once, not at every try"
