"""Metrics by tenant, with a bounded number of series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Histogram

from ragcache_core.access.caller import MAX_NAMED_TENANTS, NO_TENANT, OTHER_TENANTS
from ragcache_wire.telemetry.catalogue import gateway as rows
from ragcache_wire.telemetry.metric_registry import MetricRegistry

_SOURCES: Final = rows.TENANT_PROMPT_TOKENS.labels[-1].values
_OUTCOMES: Final = rows.TENANT_REQUESTS.labels[-1].values

CLIENT_CLOSED_STATUS: Final = 499
"""Status counted for a client that disconnected before its answer began, as nginx does."""


class TenantMetrics:
    """What each tenant sent and got.

    The file of keys says which tenants are named (``access.key_file``). The file may change while
    the gateway runs, and a series is never removed. So a tenant that would be one too many since
    the start counts among the others.

    Args:
        max_labels: Most values of the label, with those of the others and of no tenant.
    """

    def __init__(
        self, instruments: MetricRegistry, max_labels: int = MAX_NAMED_TENANTS + 2
    ) -> None:
        self._requests = instruments.counter(rows.TENANT_REQUESTS)
        self._first_token = instruments.histogram(rows.TENANT_TIME_TO_FIRST_TOKEN)
        self._prompt_tokens = instruments.counter(rows.TENANT_PROMPT_TOKENS)
        self._output_tokens = instruments.counter(rows.TENANT_OUTPUT_TOKENS)
        self._max_labels = max_labels
        # They exist before the first request, so that a query tells zero from nothing.
        self._series = {name: self._series_of(name) for name in (NO_TENANT, OTHER_TENANTS)}

    def observe_request(self, tenant: str, status: int) -> None:
        """Count a request.

        Args:
            tenant: ``Caller.tenant_label``, here and below.
            status: HTTP status, or CLIENT_CLOSED_STATUS.
        """
        self._of(tenant).requests[_outcome(status)].inc()

    def observe_first_token(self, tenant: str, first_token_s: float) -> None:
        """Record the time to the first token of an answer, in seconds."""
        self._of(tenant).first_token.observe(first_token_s)

    def observe_tokens(
        self, tenant: str, prompt_by_source: Mapping[str, int], output_tokens: int
    ) -> None:
        """Count the tokens of a complete answer.

        Args:
            prompt_by_source: Prompt tokens by the source of their KV.
        """
        series = self._of(tenant)
        for source, num_tokens in prompt_by_source.items():
            series.prompt_tokens[source].inc(max(0, num_tokens))
        series.output_tokens.inc(output_tokens)

    def _of(self, tenant: str) -> _TenantSeries:
        found = self._series.get(tenant)
        if found is None:
            if len(self._series) >= self._max_labels:
                return self._series[OTHER_TENANTS]
            found = self._series[tenant] = self._series_of(tenant)
        return found

    def _series_of(self, tenant: str) -> _TenantSeries:
        return _TenantSeries(
            {outcome: self._requests.labels(tenant, outcome) for outcome in _OUTCOMES},
            self._first_token.labels(tenant),
            {source: self._prompt_tokens.labels(tenant, source) for source in _SOURCES},
            self._output_tokens.labels(tenant),
        )


@dataclass(frozen=True, slots=True)
class _TenantSeries:
    """The series of one tenant, found once: prometheus_client takes microseconds for each."""

    requests: Mapping[str, Counter]
    first_token: Histogram
    prompt_tokens: Mapping[str, Counter]
    output_tokens: Counter


def _outcome(status: int) -> str:
    if status == CLIENT_CLOSED_STATUS:
        return "disconnected"
    return "answered" if status < 400 else "refused" if status < 500 else "failed"
