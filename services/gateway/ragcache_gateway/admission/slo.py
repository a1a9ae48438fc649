"""Admission by SLO: refuses questions that are predicted to exceed a limit on latency.

Nothing is refused on the guess of a cold engine: one that has reported no costs, or has not yet
answered a few questions whose times were predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from ragcache_core.access.caller import Caller
from ragcache_core.planner.request_plan import PlanSeconds, RequestPlan
from ragcache_core.scheduling.admission import (
    LatencyForecast,
    LatencyLimits,
    Refusal,
    RefusalCode,
    judge,
    judge_early,
)
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_core.scheduling.queue_error import QueueError
from ragcache_gateway.admission.decode_limit import DecodeLimit
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads, unix_ms
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.settings import GatewaySettings

MIN_PREDICTIONS: Final = 4
"""Answers of an engine whose times were predicted and then measured, before it refuses any."""

RETRIED_OF: Final = 16
"""One request of this many that an idle engine would refuse is served. Otherwise an engine that was
slow for a while would refuse all, and nothing would show that it is fast again."""

DEADLINE_FIELD: Final = "ragcache.deadline_ms"

_SLO: Final = "spec.gateway.slo"
_LIMITS: Final = {
    RefusalCode.FIRST_TOKEN: f"{_SLO}.firstTokenMilliseconds",
    RefusalCode.NEXT_TOKEN: f"{_SLO}.nextTokenMilliseconds",
    RefusalCode.DEADLINE: DEADLINE_FIELD,
}


@dataclass(slots=True)
class _Observed:
    """What the gateway has measured of one engine."""

    num_predictions: int = 0
    num_refused_idle: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request arrived, and until when its client waits.

    Attributes:
        elapsed_s: Returns the seconds since then.
        deadline_s: Most seconds from then to the first token. None: the client has set no deadline.
    """

    elapsed_s: Callable[[], float]
    deadline_s: float | None = None


class SloAdmission:
    """Judges requests by ``spec.gateway.slo`` and by their own deadlines. For one event loop."""

    def __init__(self, settings: GatewaySettings, loads: EngineLoads, metrics: Metrics) -> None:
        limit_ms = settings.slo_first_token_ms
        self._first_token_s = None if limit_ms is None else limit_ms / 1e3
        self._decodes = DecodeLimit(settings, loads)
        self._loads = loads
        self._metrics = metrics
        self._observed: WeakKeyDictionary[Engine, _Observed] = WeakKeyDictionary()
        self._queue_errors: dict[tuple[int, str | None], QueueError] = {}  # by band and tenant

    def check_queues(self, arrival: Arrival, position: QueuePosition) -> None:
        """Refuse a request that has to wait too long in every engine, before it costs anything.

        Args:
            position: The first one that the request can have in an engine's queue.

        Raises:
            Refused: The queues exceed a limit.
        """
        engines = self._loads.engines.healthy
        if not engines or not all(map(self._is_known, engines)):
            return
        queue_s = min(self._queue_s(engine, position) for engine in engines)
        refusal = judge_early(arrival.elapsed_s(), queue_s, self._limits(arrival))
        if refusal is not None:
            raise _refused(refusal)

    @contextmanager
    def admitted(
        self,
        arrival: Arrival,
        plan: RequestPlan,
        engine: Engine | None,
        position: QueuePosition,
    ) -> Generator[None, None, None]:
        """Refuse a request whose best plan exceeds a limit, or count it as waiting in the context.

        Args:
            engine: That of the plan. None: it has left.
            position: In the engine's queue.

        Raises:
            Refused: A limit is exceeded. The context does not run.
        """
        if engine is None:
            yield
            return
        limits = self._limits(arrival)
        forecast = self._forecast(arrival, plan, engine, position)
        if forecast.first_token_s is not None:
            self._metrics.observe_predicted_first_token(forecast.first_token_s)
        refusal = judge(forecast, limits)
        if refusal is not None and not self._is_retried(refusal, engine):
            raise _refused(refusal)
        seconds = plan.seconds.total_s - plan.seconds.queue_s if plan.seconds is not None else 0.0
        with engine.waiting.counted(position.priority(unix_ms()), seconds):
            yield

    def num_decoding(self, engine: Engine) -> int:
        """Return the number of answers that an engine generates now."""
        return self._decodes.num_decoding(engine)

    def record_prediction(
        self, engine: Engine, caller: Caller, predicted: PlanSeconds, took_s: float
    ) -> None:
        """Record that an engine has answered a request whose time was predicted.

        Args:
            took_s: From when it was sent to its first token.
        """
        self._of(engine).num_predictions += 1
        work_s = predicted.total_s - predicted.queue_s
        error = self._queue_errors.setdefault((caller.priority, caller.tenant), QueueError())
        error.observe(predicted.queue_s, took_s, work_s)

    def _queue_s(self, engine: Engine, position: QueuePosition) -> float:
        """Return the seconds that most requests of a tenant wait at most in such a position."""
        error = self._queue_errors.get((position.band, position.tenant))
        return self._loads.queue_s(engine, position) * (error.factor if error else 1.0)

    def _of(self, engine: Engine) -> _Observed:
        return self._observed.setdefault(engine, _Observed())

    def _limits(self, arrival: Arrival) -> LatencyLimits:
        return LatencyLimits(self._first_token_s, self._decodes.seconds, arrival.deadline_s)

    def _is_known(self, engine: Engine) -> bool:
        has_costs = self._loads.costs(engine) is not None
        return has_costs and self._of(engine).num_predictions >= MIN_PREDICTIONS

    def _forecast(
        self, arrival: Arrival, plan: RequestPlan, engine: Engine, position: QueuePosition
    ) -> LatencyForecast:
        queue_s, work_s = 0.0, None
        if plan.seconds is not None and self._is_known(engine):
            queue_s = self._queue_s(engine, position)
            work_s = plan.seconds.total_s - plan.seconds.queue_s
        return LatencyForecast(
            arrival.elapsed_s(),
            queue_s,
            work_s,
            self._decodes.next_token_s(engine),
            self._decodes.wait_s(engine),
        )

    def _is_retried(self, refusal: Refusal, engine: Engine) -> bool:
        """Whether a request is served to find out whether an idle engine is still that slow."""
        if refusal.fits_idle or refusal.reason is RefusalCode.DEADLINE or engine.in_flight:
            return False
        observed = self._of(engine)
        observed.num_refused_idle += 1
        return observed.num_refused_idle % RETRIED_OF == 0


def _refused(refusal: Refusal) -> Refused:
    field = DEADLINE_FIELD if refusal.reason is RefusalCode.DEADLINE else None
    return Refused(refusal.reason, _problem(refusal), refusal.retry_after_s, field)


def _problem(refusal: Refusal) -> str:
    """Say what was predicted, which field sets the limit, and what to do."""
    what = "first token is predicted after"
    if refusal.reason is RefusalCode.NEXT_TOKEN:
        what = "time between tokens is predicted to be"
    fix = "try again later"
    if not refusal.fits_idle:
        fix = "it would be so without a queue, too: ask for less, or raise the limit"
    limit = f"{_LIMITS[refusal.reason]} allows {1e3 * refusal.limit_s:.0f} ms"
    return f"the {what} {1e3 * refusal.predicted_s:.0f} ms, and {limit}; {fix}"
