"""The reported readiness follows the checks, also if one raises an error."""

from __future__ import annotations

from ragcache_retriever.readiness import ReadinessMonitor


async def test_a_check_that_fails_unexpectedly_is_a_problem_until_it_passes() -> None:
    is_broken = True
    reported: list[str] = []

    async def check() -> str | None:
        if is_broken:
            raise KeyError("row")
        return None

    async def ready() -> None:
        reported.append("ready")

    async def not_ready(problem: str) -> None:
        reported.append(problem)

    monitor = ReadinessMonitor(check, ready, not_ready)
    await monitor.update()
    is_broken = False
    await monitor.update()
    assert reported == ["the check failed: KeyError('row')", "ready"]
