"""The gateway's metrics, as the catalogue describes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter

from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.telemetry.tenant_metrics import TenantMetrics
from ragcache_wire.sandbox import SandboxSupport
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry.catalogue import gateway as rows
from ragcache_wire.telemetry.metric_registry import MetricRegistry, exemplar
from ragcache_wire.tracing import current_span


@dataclass(frozen=True, slots=True)
class AnswerCost:
    """What a complete answer took.

    Attributes:
        stages_ms: Time of each stage; None if the engine gave no record.
        tokens_by_source: Prompt tokens by the source of their KV; empty without a record.
        loaded_bytes: KV loaded from the cache store.
        miss: Why the engine loaded no more; None without a record.
        prompt_tokens: Tokens of the prompt; None if the engine did not report its usage.
        completion_tokens: Tokens of the answer; 0 if the engine did not report its usage.
        first_token_s: Time until the first token; None if it is not known.
        total_s: Time until the last token.
    """

    stages_ms: Mapping[str, float | None]
    tokens_by_source: Mapping[str, int]
    loaded_bytes: int
    miss: str | None
    prompt_tokens: int | None
    completion_tokens: int
    first_token_s: float | None
    total_s: float

    @property
    def loaded(self) -> str:
        """What was loaded of what was planned, as the label of a metric."""
        if self.miss is None:
            return "unknown"
        tokens = self.tokens_by_source
        if not any(tokens.get(source) for source in ("loaded", "blended", "recomputed")):
            return "none"
        return "partial" if self.miss else "full"


class FrequentCounter:
    """A counter that is added to for each chunk of each answer.

    prometheus_client takes several microseconds to find a series by its labels. This remembers the
    series, whose number the catalogue bounds.

    Args:
        counter: None of its series is ever removed.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._series: dict[tuple[str, ...], Counter] = {}

    def add(self, *labels: str, number: float = 1) -> None:
        """Add to the series with these values of the labels."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._counter.labels(*labels)
        series.inc(number)


class Metrics:
    """The metrics of one gateway.

    Args:
        model: Name of the model whose series are set. See ``of_model`` for others.
    """

    def __init__(self, model: str = "") -> None:
        self._instruments = MetricRegistry("gateway")
        self.registry = self._instruments.collectors
        self._define_answer_metrics()
        self._define_request_metrics()
        self._define_engine_metrics()
        self._define_background_metrics()
        self._define_speculation_metrics()
        self._define_delete_metrics()
        self.tenants = TenantMetrics(self._instruments)
        self._select_model(model)

    def of_model(self, model: str) -> Metrics:
        """Return the same metrics with the series of another model, where the model is a label."""
        found = copy.copy(self)
        found._select_model(model)
        return found

    def _select_model(self, model: str) -> None:
        labels = (names.OPERATION_CHAT, names.PROVIDER, model)
        self._first_token = self._first_tokens.labels(*labels)
        self._request_duration = self._request_durations.labels(*labels)
        self._output_token = self._output_tokens_s.labels(*labels)
        self._input_tokens = self._usage.labels(*labels, names.INPUT_TOKENS)
        self._output_tokens = self._usage.labels(*labels, names.OUTPUT_TOKENS)
        self.precompute_waiting = self._precompute_waiting.labels(model)
        self.blend_alpha = self._blend_alpha.labels(model)
        self.blend_quality = self._blend_quality.labels(model)
        self.blend_recomputed = self._blend_recomputed.labels(model)
        for gauge in (self.blend_alpha, self.blend_quality, self.blend_recomputed):
            gauge.set(math.nan)

    def _define_answer_metrics(self) -> None:
        registry = self._instruments
        self._first_tokens = registry.histogram(rows.TIME_TO_FIRST_TOKEN)
        self._predicted_first_token = registry.histogram(rows.PREDICTED_TIME_TO_FIRST_TOKEN)
        self._request_durations = registry.histogram(rows.REQUEST_DURATION)
        self._output_tokens_s = registry.histogram(rows.TIME_PER_OUTPUT_TOKEN)
        self._usage = registry.histogram(rows.TOKEN_USAGE)
        self._stage = registry.histogram(rows.STAGE)
        self._prompt_tokens = registry.counter(rows.PROMPT_TOKENS)
        self._loaded_bytes = registry.counter(rows.LOADED_BYTES)
        self._answers = registry.counter(rows.ANSWERS)
        self._prediction_ratio = registry.histogram(rows.PREDICTION_RATIO)
        self.chunks = FrequentCounter(registry.counter(rows.CHUNKS))
        self.chunk_misses = FrequentCounter(registry.counter(rows.CHUNK_MISSES))
        self.planned_chunks = FrequentCounter(registry.counter(rows.PLANNED_CHUNKS))
        # They exist before the first answer, so that a query tells zero from nothing.
        self.chunks.add("computed", "", number=0)
        self.chunk_misses.add("never stored", number=0)

    def _define_request_metrics(self) -> None:
        self.requests = self._instruments.counter(rows.REQUESTS)
        self.in_flight = self._instruments.gauge(rows.REQUESTS_IN_FLIGHT)
        self.connections = self._instruments.gauge(rows.CONNECTIONS)
        self.connections_refused = self._instruments.counter(rows.CONNECTIONS_REFUSED)
        self.refusals = self._instruments.counter(rows.REFUSALS)
        for reason in RefusalCode:
            self.refusals.labels(reason)
        self._reader_protections = self._instruments.gauge(rows.READER_PROTECTIONS)
        self.audit_events = self._instruments.counter(rows.AUDIT_EVENTS)
        self.audit_failing = self._instruments.gauge(rows.AUDIT_FAILING)
        self.keys_stale = self._instruments.gauge(rows.KEYS_STALE)
        self.issuers_failing = self._instruments.gauge(rows.ISSUERS_FAILING)
        self.slow_headers = self._instruments.counter(rows.SLOW_HEADERS)
        self.disconnects = self._instruments.counter(rows.CLIENT_DISCONNECTS)
        self.upstream_failures = self._instruments.counter(rows.UPSTREAM_FAILURES)
        self.answers_resumed = self._instruments.counter(rows.ANSWERS_RESUMED)
        # They exist before the first failure, so that a query tells zero from nothing.
        for part in ("engine", "retriever", "cachestore"):
            self.upstream_failures.labels(part)

    def _define_engine_metrics(self) -> None:
        self.engine_in_flight = self._instruments.gauge(rows.ENGINE_REQUESTS_IN_FLIGHT)
        self.engine_failures = self._instruments.counter(rows.ENGINE_FAILURES)
        self.handoffs = self._instruments.counter(rows.HANDOFFS)
        self._sources = self._instruments.gauge(rows.SOURCES)

    def _define_background_metrics(self) -> None:
        registry = self._instruments
        self.precomputed = registry.counter(rows.PRECOMPUTED_CHUNKS)
        self._precompute_waiting = registry.gauge(rows.PRECOMPUTE_WAITING_CHUNKS)
        self.precomputed_tokens = registry.counter(rows.PRECOMPUTED_TOKENS)
        self.precompute_seconds = registry.counter(rows.PRECOMPUTE_SECONDS)
        self.background_delay = registry.counter(rows.BACKGROUND_DELAY)
        self._blend_alpha = registry.gauge(rows.BLEND_ALPHA)
        self._blend_quality = registry.gauge(rows.BLEND_EXPECTED_QUALITY)
        self._blend_recomputed = registry.gauge(rows.BLEND_EXPECTED_RECOMPUTED)
        self.blend_trials = registry.counter(rows.BLEND_TRIALS)

    def _define_speculation_metrics(self) -> None:
        registry = self._instruments
        self.speculation_decisions = registry.counter(rows.SPECULATION_DECISIONS)
        self.speculation_guesses = registry.counter(rows.SPECULATION_GUESSES)
        self.speculation_wasted_tokens = registry.counter(rows.SPECULATION_WASTED_TOKENS)
        self.speculation_saved_s = registry.counter(rows.SPECULATION_SAVED)
        self.speculation_warm_ups = registry.counter(rows.SPECULATION_WARM_UPS)
        self.speculation_prefetched = registry.counter(rows.SPECULATION_PREFETCHED_VARIANTS)

    def _define_delete_metrics(self) -> None:
        self.deletes_waiting = self._instruments.gauge(rows.DELETES_WAITING)
        self.deletes_lost = self._instruments.counter(rows.DELETES_LOST)

    def remove_engine(self, address: str) -> None:
        """Remove the series of an engine that has left: another engine may get its address."""
        self.engine_in_flight.remove(address)
        self.engine_failures.remove(address)

    def observe_first_token(self, first_token_s: float, tenant: str) -> None:
        """Record the time to the first token of an answer, in seconds.

        Args:
            tenant: ``Caller.tenant_label``, here and below.
        """
        self._first_token.observe(first_token_s, _exemplar())
        self.tenants.observe_first_token(tenant, first_token_s)

    def observe_predicted_first_token(self, predicted_s: float) -> None:
        """Record the time to the first token that a question's last plan predicts, in seconds."""
        self._predicted_first_token.observe(predicted_s, _exemplar())

    def observe_prediction(self, predicted_s: float, took_s: float) -> None:
        """Record the predicted and the measured time from the engine's queue to the first token."""
        if predicted_s > 0:
            self._prediction_ratio.observe(took_s / predicted_s, _exemplar())

    def set_reader_protections(self, support: SandboxSupport) -> None:
        """Set which protections the processes have that read documents."""
        for name, has in support.protections.items():
            self._reader_protections.labels(name).set(has)

    def set_sources(self, number: Mapping[tuple[str, str], int]) -> None:
        """Set how many sources the cache view has, by their kind and state."""
        for kind, state in rows.SOURCES.known_series():
            self._sources.labels(kind, state).set(number.get((kind, state), 0))

    def observe_answer(self, cost: AnswerCost, tenant: str) -> None:
        """Count a complete answer."""
        self.tenants.observe_tokens(tenant, cost.tokens_by_source, cost.completion_tokens)
        trace = _exemplar()
        for stage, time_ms in cost.stages_ms.items():
            if time_ms is not None:
                self._stage.labels(stage).observe(time_ms / 1e3, trace)
        for source, num_tokens in cost.tokens_by_source.items():
            self._prompt_tokens.labels(source).inc(max(0, num_tokens))
        self._loaded_bytes.inc(cost.loaded_bytes)
        self._answers.labels(cost.loaded, cost.miss or "").inc()
        self._request_duration.observe(cost.total_s, trace)
        if cost.prompt_tokens is not None:
            self._input_tokens.observe(cost.prompt_tokens)
            self._output_tokens.observe(cost.completion_tokens)
        if cost.completion_tokens > 1 and cost.first_token_s is not None:
            decode_s = cost.total_s - cost.first_token_s
            self._output_token.observe(decode_s / (cost.completion_tokens - 1), trace)


def _exemplar() -> dict[str, str] | None:
    """Return an exemplar that leads to the trace of the request, if it is sampled."""
    span = current_span()
    return exemplar(span.headers()) if span.is_recording else None
