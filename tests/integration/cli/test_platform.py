"""LocalPlatform with small real processes in the place of the services."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from harness.processes import free_port
from ragcache_cli.local import platform as local_platform
from ragcache_cli.local import supervisor as supervisor_module
from ragcache_cli.local.component import Check, LocalComponent, Prober
from ragcache_cli.local.platform import ComponentEvent, ComponentFailed, LocalPlatform
from ragcache_cli.local.state_file import PlatformRecord, find_data, read_record
from ragcache_cli.local.supervision import ProcessPhase, ProcessState, RestartPolicy
from ragcache_cli.local.supervisor import ComponentSupervisor
from ragcache_core.errors import InvalidInput, NotFound, Unavailable
from ragcache_core.plan.signature import parse_keys
from ragcache_operator.builders.placement import Address
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.ragcache import RagCache
from tests.integration.cli.stand_ins import living, stand_ins

QUICK = RestartPolicy(first_wait_s=0.01, longest_wait_s=0.1)

Habits = Callable[..., None]


@pytest.fixture
def cache(tmp_path: Path) -> RagCache:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs"},
            "spec": {"model": {"source": f"path:{model}"}},
        }
    )


@pytest.fixture
def habits(monkeypatch: pytest.MonkeyPatch) -> Habits:
    """Replaces the services by stand-ins with these habits."""

    def replace(**by_component: str) -> None:
        monkeypatch.setattr(local_platform, "build_children", stand_ins(**by_component))

    replace()
    return replace


def platform_of(cache: RagCache, data: Path, **more: object) -> LocalPlatform:
    arguments = {"gateway_port": 0, "policy": QUICK, "start_timeout_s": 240.0, **more}
    return LocalPlatform(cache, data, **arguments)  # type: ignore[arg-type]


def record_of(data: Path) -> PlatformRecord:
    record = read_record(data)
    assert record is not None
    return record


@pytest.mark.usefixtures("habits")
async def test_parts_start_in_order_answer_and_leave_nothing(
    cache: RagCache, tmp_path: Path
) -> None:
    events: list[ComponentEvent] = []
    data = tmp_path / "data"
    async with platform_of(cache, data, progress=events.append) as platform:
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(f"{platform.gateway_url}/readyz")).is_success
        record = record_of(data)
        assert record.phase == "ready"
        assert record.supervisor_lives
        assert record.gateway_url == platform.gateway_url
        pids = [part.pid for part in record.parts]
        assert living(pids) == pids
        assert find_data(None, root=tmp_path) == (data, record)
        assert platform.address("cachestore", "grpc") == record.parts[0].addresses["grpc"]
        keys = data / "run" / "plan.keys"
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        assert len(parse_keys("keys", keys.read_bytes())) == 1
    assert not keys.exists()
    assert living(pids) == []
    assert read_record(data) is None
    told = [(event.component, event.state.phase) for event in events]
    for part in ("cachestore", "retriever", "engine-main", "gateway"):
        mine = [phase for name, phase in told if name == part]
        assert mine == [ProcessPhase.STARTING, ProcessPhase.READY, ProcessPhase.STOPPED]
    ready = told.index(("cachestore", ProcessPhase.READY))
    assert ready < told.index(("engine-main", ProcessPhase.STARTING))
    assert told.index(("retriever", ProcessPhase.READY)) < told.index(
        ("gateway", ProcessPhase.STARTING)
    )
    stopped = [part for part, phase in told if phase is ProcessPhase.STOPPED]
    assert stopped[:2] == ["gateway", "engine-main"]


async def test_a_part_that_dies_is_restarted_and_so_is_what_it_left(
    cache: RagCache, tmp_path: Path, habits: Habits
) -> None:
    habits(engine="has-child")
    has_died = asyncio.Event()

    def progress(event: ComponentEvent) -> None:
        if event.state.phase is ProcessPhase.BACKOFF:
            has_died.set()

    async with platform_of(cache, tmp_path / "data", progress=progress) as platform:
        first = platform.pid("engine")
        grandchild = int((platform.data / "engine-main" / "child.pid").read_text())
        assert living([grandchild])
        os.kill(first, signal.SIGKILL)
        await has_died.wait()
        assert not living([grandchild])
        await platform.until_ready()
        second = platform.pid("engine")
        assert second != first
        grandchild = int((platform.data / "engine-main" / "child.pid").read_text())
    assert living([second, grandchild]) == []


@pytest.mark.usefixtures("habits")
async def test_restart_gives_a_fresh_process_without_a_death(
    cache: RagCache, tmp_path: Path
) -> None:
    events: list[ComponentEvent] = []
    async with platform_of(cache, tmp_path / "data", progress=events.append) as platform:
        first, gateway = platform.pid("engine-main"), platform.pid("gateway")
        await platform.restart("engine")
        assert platform.pid("engine-main") != first
        assert platform.pid("gateway") == gateway
        assert platform.states()["engine-main"].deaths == 0
        with pytest.raises(NotFound, match="the components are cachestore"):
            await platform.restart("engin")
    assert not any(event.lines for event in events)


async def test_a_first_death_is_forgiven(cache: RagCache, tmp_path: Path, habits: Habits) -> None:
    habits(retriever="dies-once")
    async with platform_of(cache, tmp_path / "data") as platform:
        assert platform.states()["retriever"].restarts == 1


async def test_a_part_that_never_starts_is_given_up_with_its_last_words(
    cache: RagCache, tmp_path: Path, habits: Habits
) -> None:
    habits(engine="dies")
    with pytest.raises(ComponentFailed) as failure:
        async with platform_of(cache, tmp_path / "data"):
            pytest.fail("the platform cannot be ready")
    assert "the engine-main ended with status 3" in str(failure.value)
    assert "| this part has no luck" in str(failure.value)
    assert read_record(tmp_path / "data") is None


async def test_it_is_ready_when_questions_can_be_answered(
    cache: RagCache, tmp_path: Path, habits: Habits
) -> None:
    habits(gateway="no-answers")
    data = tmp_path / "data"
    gateway_ready = asyncio.Event()

    def progress(event: ComponentEvent) -> None:
        if event.component == "gateway" and event.state.phase is ProcessPhase.READY:
            gateway_ready.set()

    platform = platform_of(cache, data, progress=progress)
    entering = asyncio.create_task(platform.__aenter__())
    try:
        await gateway_ready.wait()
        done, _ = await asyncio.wait({entering}, timeout=1.0)
        assert not done
        assert record_of(data).phase == "starting"
        (data / "gateway" / "answers").touch()
        await entering
        assert record_of(data).phase == "ready"
    finally:
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await platform.__aexit__(None, None, None)


async def test_a_gateway_that_never_answers_questions_is_named(
    cache: RagCache, tmp_path: Path, habits: Habits, monkeypatch: pytest.MonkeyPatch
) -> None:
    habits(gateway="no-answers")
    answers = tmp_path / "data" / "gateway" / "answers"
    answers.parent.mkdir(parents=True)
    answers.touch()
    async with platform_of(cache, tmp_path / "data") as platform:
        answers.unlink()
        monkeypatch.setattr(platform, "_start_timeout_s", 0.5)
        with pytest.raises(Unavailable, match=r"gateway .* no answers after 0.5 s \(no engine\)"):
            await platform.until_ready()


async def test_a_part_that_ignores_term_is_killed(
    cache: RagCache, tmp_path: Path, habits: Habits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LONGEST_GRACE_S", 0.3)
    habits(gateway="ignores-term")
    async with platform_of(cache, tmp_path / "data") as platform:
        pid = platform.pid("gateway")
    assert not living([pid])


async def test_cancelled_while_it_starts_it_leaves_nothing(
    cache: RagCache, tmp_path: Path, habits: Habits
) -> None:
    habits(engine="never-ready")
    data = tmp_path / "data"
    started = asyncio.Event()

    def progress(event: ComponentEvent) -> None:
        if event.component == "engine-main" and event.state.phase is ProcessPhase.STARTING:
            started.set()

    async def run() -> None:
        async with platform_of(cache, data, progress=progress):
            pytest.fail("the platform cannot be ready")

    task = asyncio.create_task(run())
    await started.wait()
    pids = [part.pid for part in record_of(data).parts if part.pid]
    assert pids
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert living(pids) == []
    assert read_record(data) is None


@pytest.mark.usefixtures("habits")
async def test_a_port_in_use_names_the_field_and_who_has_it(
    cache: RagCache, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as refusal:
            async with platform_of(cache, tmp_path / "data", gateway_port=port):
                pytest.fail("the port is taken")
    assert refusal.value.field == "spec.gateway.port"
    assert f"port {port} is in use" in refusal.value.problem
    assert f"pid {os.getpid()}" in refusal.value.problem


@pytest.mark.usefixtures("habits")
async def test_a_second_one_in_the_same_folder_is_refused(cache: RagCache, tmp_path: Path) -> None:
    async with platform_of(cache, tmp_path / "data") as platform:
        with pytest.raises(InvalidInput, match="already runs in"):
            async with platform_of(cache, tmp_path / "data"):
                pytest.fail("the folder is taken")
        # The refused one has not touched what the first one says of itself.
        assert record_of(tmp_path / "data").gateway_url == platform.gateway_url


@pytest.mark.usefixtures("habits")
async def test_what_a_killed_supervisor_left_is_ended_first(
    cache: RagCache, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    program = f"""
import asyncio
from pathlib import Path
from ragcache_cli.local import platform
from ragcache_operator.spec.ragcache import RagCache
from tests.integration.cli.stand_ins import living, stand_ins
platform.build_children = stand_ins(engine="has-child")
cache = RagCache.model_validate_json({cache.model_dump_json(by_alias=True)!r})
async def main():
    async with platform.LocalPlatform(cache, Path({str(data)!r}), gateway_port=0):
        print("ready", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen(  # noqa: ASYNC220  nothing else runs meanwhile
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        pids = [part.pid for part in record_of(data).parts]
        pids.append(int((data / "engine-main" / "child.pid").read_text()))
        assert living(pids) == pids
        supervisor.kill()
    assert living(pids) == pids
    async with platform_of(cache, data):
        assert living(pids) == []


def part(tmp_path: Path, habit: str = "") -> LocalComponent:
    """A part whose probes lose patience soon."""
    address = Address("127.0.0.1", free_port())
    script = Path(inspect.getfile(stand_ins))
    check = Check(f"http://{address}/", period_s=0.05, timeout_s=1.5, failures=2)
    return LocalComponent(
        name="part",
        kind="part",
        command=(sys.executable, str(script), str(address.port), habit),
        env={},
        ports={"http": address},
        startup=replace(check, failures=6000),
        readiness=check,
        liveness=check,
        grace_s=0.2,
        after=frozenset(),
    )


@asynccontextmanager
async def kept(
    part: LocalComponent, folder: Path
) -> AsyncIterator[tuple[ComponentSupervisor, asyncio.Queue[ProcessState]]]:
    """A supervisor at work, and the states it goes through."""
    states: asyncio.Queue[ProcessState] = asyncio.Queue()
    prober = Prober()
    supervisor_ = ComponentSupervisor(
        part,
        folder,
        folder / "log",
        prober=prober,
        policy=QUICK,
        on_change=lambda k: states.put_nowait(k.state),
    )
    task = asyncio.create_task(supervisor_.run())
    try:
        yield supervisor_, states
    finally:
        supervisor_.stop()
        await task
        await prober.close()


async def until(states: asyncio.Queue[ProcessState], phase: ProcessPhase) -> ProcessState:
    while (state := await states.get()).phase is not phase:
        pass
    return state


async def test_a_part_that_stops_answering_is_restarted(tmp_path: Path) -> None:
    async with kept(part(tmp_path), tmp_path) as (supervisor_, states):
        await until(states, ProcessPhase.READY)
        assert supervisor_.child is not None
        first = supervisor_.child.pid
        os.kill(first, signal.SIGSTOP)
        dead = await until(states, ProcessPhase.BACKOFF)
        assert dead.cause == "stopped answering: no answer within 1.5 s"
        assert not living([first])
        await until(states, ProcessPhase.READY)


async def test_a_part_that_never_answers_is_given_up(tmp_path: Path) -> None:
    deaf = part(tmp_path, "never-ready")
    deaf = replace(deaf, startup=replace(deaf.startup, failures=2))
    async with kept(deaf, tmp_path) as (_, states):
        failed = await until(states, ProcessPhase.FAILED)
        assert failed.cause == "did not start: not listening"
        assert failed.deaths == QUICK.fail_after


async def test_a_command_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    missing = replace(part(tmp_path), command=(str(tmp_path / "missing"),))
    async with kept(missing, tmp_path) as (_, states):
        failed = await until(states, ProcessPhase.FAILED)
        assert failed.cause.startswith("cannot be started: [Errno 2]")


async def test_our_own_variables_are_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_MODEL", "stray")
    monkeypatch.setenv("RAGCACHE_EMBEDDER_API_KEY", "secret")
    shows = ("/usr/bin/env",)
    async with kept(replace(part(tmp_path), command=shows, env={"A": "b"}), tmp_path) as (
        _,
        states,
    ):
        await until(states, ProcessPhase.FAILED)
    shown = (tmp_path / "log").read_text().splitlines()
    assert "RAGCACHE_EMBEDDER_API_KEY=secret" in shown
    assert "A=b" in shown
    assert not any(line.startswith("RAGCACHE_MODEL") for line in shown)


async def test_cancelled_again_it_kills_without_grace(
    cache: RagCache, tmp_path: Path, habits: Habits, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With any grace at all the test would not end in its time.
    monkeypatch.setattr(supervisor_module, "LONGEST_GRACE_S", 3600.0)
    habits(gateway="ignores-term")
    is_ready = asyncio.Event()
    pids: list[int] = []

    async def run() -> None:
        async with platform_of(cache, tmp_path / "data") as platform:
            pids.extend(platform.pid(name) for name in platform.states())
            is_ready.set()
            await platform.keep_running()

    task = asyncio.create_task(run())
    await is_ready.wait()
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)
    assert task.cancelled()
    assert living(pids) == []
    assert read_record(tmp_path / "data") is None
