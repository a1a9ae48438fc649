"""Recording rules and alerts, with a runbook page for each alert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ragcache_wire.telemetry.catalogue import (
    cachestore,
    engine,
    gateway,
    operator,
    retriever,
    standard,
)
from tools.dashboards.promql import highest, increase, lowest, quantile, rate, series, total

Json = dict[str, Any]

BY: Final = ("namespace", "ragcache")
FIRST_TOKEN_OBJECTIVE_S: Final = 2.5
"""A bucket of the histogram, so that the share above it is exact.

The chart replaces it by its value ``metrics.rules.firstTokenSeconds``."""
FIRST_TOKEN_TARGET: Final = 0.99
ERROR_TARGET: Final = 0.999
_ASKED: Final = 'route=~"/v1/.*"'
DISK_FREE_TARGET: Final = 0.1
"""Share of the space for documents. Volumes differ too much in size for a number of bytes."""
_DISK: Final = 'tier="disk"'
_FREE_SHARE: Final = (
    f"{series(retriever.DISK_FREE)} / "
    f"({series(retriever.DISK_FREE)} + {series(retriever.DISK_USED)})"
)
_PROTECTIONS: Final = " or ".join(
    lowest(series(row), *BY, "pod", "protection")
    for row in (gateway.READER_PROTECTIONS, retriever.SPLITTER_PROTECTIONS)
)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule."""

    name: str
    expression: str

    def json(self) -> Json:
        """Return the rule of a PrometheusRule."""
        return {"record": self.name, "expr": self.expression}


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison with a threshold. Its left side has data also while nothing is wrong."""

    value: str
    comparison: Literal[">", "<", "=="]
    threshold: str

    def __str__(self) -> str:
        return f"({self.value}) {self.comparison} {self.threshold}"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that fires while all conditions hold.

    Attributes:
        wait: How long they have to hold, like ``5m``.
        summary: One line for the notification.
    """

    name: str
    conditions: Sequence[Condition]
    wait: str
    severity: Literal["critical", "warning"]
    summary: str

    @property
    def expression(self) -> str:
        """The PromQL of the alert."""
        return " and ".join(map(str, self.conditions))

    @property
    def runbook(self) -> str:
        """Path of its runbook page."""
        return f"docs/runbooks/{self.name}.md"

    def json(self) -> Json:
        """Return the rule of a PrometheusRule."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": self.runbook},
        }


def slow_share(window: str) -> str:
    """Return the share of first tokens that came later than the objective."""
    all_ = total(rate(gateway.TIME_TO_FIRST_TOKEN, suffix="_count", window=window), *BY)
    bound = f'le="{FIRST_TOKEN_OBJECTIVE_S}"'
    fast = total(rate(gateway.TIME_TO_FIRST_TOKEN, bound, suffix="_bucket", window=window), *BY)
    return f"1 - {fast} / {all_}"


def error_share(window: str) -> str:
    """Return the share of requests that the platform failed. A 504 is a deadline of the client."""
    all_ = total(rate(gateway.REQUESTS, _ASKED, window=window), *BY)
    failed = total(rate(gateway.REQUESTS, _ASKED, 'code=~"50[0-3]"', window=window), *BY)
    # Without any failure there is no series of failures.
    return f"({failed} or 0 * {all_}) / {all_}"


WINDOWS: Final = ("5m", "30m", "1h", "6h")
SLOW: Final = "ragcache:first_token_slow:ratio_rate"
ERRORS: Final = "ragcache:errors:ratio_rate"

RECORDINGS: Final[tuple[Recording, ...]] = (
    *(Recording(f"{SLOW}{window}", slow_share(window)) for window in WINDOWS),
    *(Recording(f"{ERRORS}{window}", error_share(window)) for window in WINDOWS),
    *(
        Recording(
            f"ragcache:first_token_seconds:p{round(share * 100)}_5m",
            quantile(share, gateway.TIME_TO_FIRST_TOKEN, by=BY, window="5m"),
        )
        for share in (0.5, 0.95)
    ),
    Recording(
        "ragcache:saved_tokens:rate5m",
        total(rate(gateway.PROMPT_TOKENS, 'source=~"loaded|blended|local"', window="5m"), *BY),
    ),
    Recording(
        "ragcache:saved_tokens:ratio_rate5m",
        f"ragcache:saved_tokens:rate5m / {total(rate(gateway.PROMPT_TOKENS, window='5m'), *BY)}",
    ),
    Recording("ragcache:saved_seconds:rate5m", total(rate(engine.SAVED_SECONDS, window="5m"), *BY)),
    Recording(
        "ragcache:store_hits:ratio_rate5m",
        f"{total(rate(cachestore.HITS, window='5m'), *BY)} / "
        f"({total(rate(cachestore.HITS, window='5m'), *BY)} + "
        f"{total(rate(cachestore.MISSES, window='5m'), *BY)})",
    ),
)


def _burns(name: str, target: float, factor: float, windows: tuple[str, str]) -> list[Condition]:
    """Return the conditions of a burn rate over a long window, and over a short one."""
    threshold = f"{factor * (1 - target):.6g}"
    return [Condition(f"{name}{window}", ">", threshold) for window in windows]


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        "RagCacheFirstTokenBurnsFast",
        _burns(SLOW, FIRST_TOKEN_TARGET, 14.4, ("1h", "5m")),
        "2m",
        "critical",
        "Many first tokens are later than 2.5 s: the monthly budget ends within two days.",
    ),
    Alert(
        "RagCacheFirstTokenBurnsSlowly",
        _burns(SLOW, FIRST_TOKEN_TARGET, 6, ("6h", "30m")),
        "15m",
        "warning",
        "First tokens are later than 2.5 s: the monthly budget ends within five days.",
    ),
    Alert(
        "RagCacheErrorsBurnFast",
        _burns(ERRORS, ERROR_TARGET, 14.4, ("1h", "5m")),
        "2m",
        "critical",
        "Many requests fail with 5xx: the monthly budget ends within two days.",
    ),
    Alert(
        "RagCacheErrorsBurnSlowly",
        _burns(ERRORS, ERROR_TARGET, 6, ("6h", "30m")),
        "15m",
        "warning",
        "Requests fail with 5xx: the monthly budget ends within five days.",
    ),
    Alert(
        "RagCachePartDown",
        [Condition(series(standard.UP, 'ragcache!=""'), "==", "0")],
        "5m",
        "critical",
        "Prometheus cannot scrape {{ $labels.component }} {{ $labels.pod }}.",
    ),
    Alert(
        "RagCacheStoreDiskTooSmall",
        [
            Condition(
                f"{total(increase(cachestore.EVICTIONS_SIZE, _DISK, window='1h'), *BY)} / "
                f"{total(series(cachestore.CAPACITY, _DISK), *BY)}",
                ">",
                "0.5",
            )
        ],
        "30m",
        "warning",
        "The cache store evicts half of its disk in an hour.",
    ),
    Alert(
        "RagCacheStoreWritesLag",
        [Condition(highest(series(cachestore.UNWRITTEN), *BY, "pod"), ">", "256")],
        "10m",
        "warning",
        "The disk of {{ $labels.pod }} is slower than its writes.",
    ),
    Alert(
        "RagCacheDocumentsDiskFull",
        [
            Condition(
                f"min by ({', '.join((*BY, 'pod'))}) ({_FREE_SHARE})",
                "<",
                str(DISK_FREE_TARGET),
            )
        ],
        "5m",
        "critical",
        "The volume of {{ $labels.pod }} is almost full of documents.",
    ),
    Alert(
        "RagCacheIndexBehind",
        [Condition(highest(series(retriever.INDEX_MISSED), *BY, "pod"), ">", "0")],
        "10m",
        "warning",
        "Searches by vectors of {{ $labels.pod }} lack changes of documents.",
    ),
    Alert(
        "RagCacheQualityGateClosed",
        [Condition(highest(series(gateway.BLEND_ALPHA), *BY), "==", "+Inf")],
        "15m",
        "warning",
        "No setting of blends reaches the quality target, so questions are computed.",
    ),
    Alert(
        "RagCacheReuseCostsTime",
        [
            Condition(
                f"{total(rate(engine.EXCESS_SECONDS, window='30m'), *BY)} - "
                f"{total(rate(engine.SAVED_SECONDS, window='30m'), *BY)}",
                ">",
                "0",
            )
        ],
        "30m",
        "warning",
        "Loads take longer than computing would.",
    ),
    Alert(
        "RagCachePlansForged",
        [
            Condition(
                total(
                    increase(engine.REFUSED_PLANS, 'reason=~"unsigned|forged"', window="15m"), *BY
                ),
                ">",
                "0",
            )
        ],
        "0m",
        "warning",
        "An engine refused plans that no gateway of this RagCache has signed.",
    ),
    Alert(
        "RagCacheDeletesWait",
        [Condition(highest(series(gateway.DELETES_WAITING), *BY), ">", "0")],
        "15m",
        "warning",
        "Deletes of stored KV wait for a shard of the cache store.",
    ),
    Alert(
        "RagCacheAuditFails",
        [Condition(highest(series(gateway.AUDIT_FAILING), *BY, "pod"), ">", "0")],
        "1m",
        "critical",
        "{{ $labels.pod }} cannot write its audit log, and changes no documents.",
    ),
    Alert(
        "RagCacheKeysStale",
        [Condition(highest(series(gateway.KEYS_STALE), *BY, "pod"), ">", "0")],
        "5m",
        "warning",
        "{{ $labels.pod }} cannot use its file of API keys, so removed keys stay valid.",
    ),
    Alert(
        "RagCacheIssuerFails",
        [Condition(highest(series(gateway.ISSUERS_FAILING), *BY, "pod"), ">", "0")],
        "5m",
        "warning",
        "{{ $labels.pod }} cannot read the public keys of an issuer of tokens.",
    ),
    Alert(
        "RagCacheReadersUnprotected",
        [Condition(_PROTECTIONS, "<", "1")],
        "15m",
        "warning",
        "{{ $labels.pod }} reads documents without {{ $labels.protection }}.",
    ),
    Alert(
        "RagCacheOperatorHasNoLeader",
        [Condition(highest(series(operator.LEADING)), "==", "0")],
        "5m",
        "critical",
        "No replica of the operator leads, so nothing is reconciled.",
    ),
    Alert(
        "RagCacheReconcileFails",
        [
            Condition(
                total(
                    increase(operator.RECONCILE, 'outcome="failed"', suffix="_count", window="15m"),
                    "kind",
                ),
                ">",
                "0",
            )
        ],
        "15m",
        "warning",
        "Reconcile passes of {{ $labels.kind }} objects fail.",
    ),
)


def groups() -> list[Json]:
    """Return the rule groups, for a rule file and for a PrometheusRule."""
    return [
        {"name": "ragcache.recordings", "rules": [rule.json() for rule in RECORDINGS]},
        {"name": "ragcache.alerts", "rules": [alert.json() for alert in ALERTS]},
    ]
