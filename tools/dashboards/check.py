"""Checks dashboards and rules: the files, and every query against a real Prometheus."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ragcache_wire.telemetry.catalogue import all_rows, gateway
from ragcache_wire.telemetry.instrument import Label
from tests.cluster.availability import Unavailable
from tests.cluster.packages import require
from tests.kit.telemetry import Collector, collector
from tools.dashboards.content import DASHBOARDS
from tools.dashboards.files import ROOT, RULES, stale
from tools.dashboards.grafana_schema import schema_problems
from tools.dashboards.live.loaded_platform import Load, operator_target, running_platform
from tools.dashboards.live.operator_run import running_operator
from tools.dashboards.live.prometheus_server import (
    PACKAGES,
    PrometheusServer,
    check_rules,
    running_prometheus,
)
from tools.dashboards.metric_names import OUR_PREFIXES, names_in, series_names, undocumented
from tools.dashboards.promql import series
from tools.dashboards.rules import ALERTS, RECORDINGS

_VARIABLES: Final = (
    ("$__rate_interval", "30s"),
    ("$__range", "5m"),
    ("$namespace", ".*"),
    ("$ragcache", ".*"),
)
"""What Grafana would put in the place of a dashboard's variables."""
_MAY_BE_UNKNOWN: Final = "ragcache_gateway_blend_"
"""Figures of the quality gate, which are NaN before they are known."""
LIMIT_S: Final = 240.0
"""Longest load. It ends as soon as every query has data."""
LEAST_LOAD_S: Final = 20.0
_AGAIN_S: Final = 5.0
_EXPORT_WAIT_S: Final = 20.0
"""More than the interval of OTLP exports."""


@dataclass(frozen=True, slots=True)
class CheckedQuery:
    """A query with the place that it is from."""

    where: str
    expression: str

    @property
    def filled(self) -> str:
        """The query with values for the variables."""
        text = self.expression
        for name, value in _VARIABLES:
            text = text.replace(name, value)
        return text

    @property
    def needs_operator(self) -> bool:
        """Whether only an operator can give it data."""
        is_ours = 'component="operator"' in self.expression
        return is_ours or any(
            name.startswith("ragcache_operator") for name in names_in(self.expression)
        )


@dataclass(slots=True)
class CheckReport:
    """What was checked and what is wrong."""

    problems: list[str] = field(default_factory=list)
    without_data: list[CheckedQuery] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)
    unbounded_labels: list[str] = field(default_factory=list)
    unseen_rows: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_exemplars: int = 0
    num_answers: int = 0
    otlp_parts: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether nothing is wrong."""
        wrong = (self.problems, self.without_data, self.undocumented, self.unbounded_labels)
        return not any(wrong)

    def json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "dashboards": len(DASHBOARDS),
            "panels": sum(len(one.panels) for one in DASHBOARDS),
            "queries": len(all_queries()),
            "queries_without_data": len(self.without_data),
            "metrics_undocumented": len(self.undocumented),
            "recordings": len(RECORDINGS),
            "alerts": len(ALERTS),
            "labels_over_bound": len(self.unbounded_labels),
            "exemplars": self.num_exemplars,
            "otlp_parts": self.otlp_parts,
            "answers": self.num_answers,
            "rows_not_seen": self.unseen_rows,
            "problems": self.problems,
            "skipped": self.skipped,
            "passed": self.has_passed,
        }


def all_queries() -> list[CheckedQuery]:
    """Return every query of every panel and rule."""
    panels = [
        CheckedQuery(f"{dashboard.name}: {panel.title}", query.expression)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
    ]
    recordings = [CheckedQuery(one.name, one.expression) for one in RECORDINGS]
    # While nothing is wrong, only the left sides of the comparisons return data.
    alerts = [
        CheckedQuery(alert.name, condition.value)
        for alert in ALERTS
        for condition in alert.conditions
    ]
    return [*panels, *recordings, *alerts]


def static_problems() -> list[str]:
    """Return what is wrong with the files."""
    found = [f"stale: {path.relative_to(ROOT)}" for path in stale()]
    for dashboard in DASHBOARDS:
        found += [f"{dashboard.name}: {one}" for one in schema_problems(dashboard.json())]
    names = [dashboard.name for dashboard in DASHBOARDS]
    found += [f"two dashboards are named {name}" for name in set(names) if names.count(name) > 1]
    found += [
        f"{alert.name} has no page {alert.runbook}"
        for alert in ALERTS
        if not (ROOT / alert.runbook).is_file()
    ]
    return found


def undocumented_names() -> list[str]:
    """Return names in queries and rules that the catalogue does not describe."""
    expressions = [query.expression for query in all_queries()]
    names = {name for expression in expressions for name in names_in(expression)}
    return undocumented(names, [one.name for one in RECORDINGS])


def check() -> CheckReport:
    """Check everything. Without Prometheus, only the files are checked."""
    report = CheckReport(static_problems(), undocumented=undocumented_names())
    try:
        require(PACKAGES)
    except Unavailable as reason:
        report.skipped.append(f"queries: {reason}")
        return report
    report.problems += check_rules(RULES)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dashboards-")))
        operator = _operator(folder, stack, report)
        received = stack.enter_context(collector())
        _say("starting the platform")
        platform = stack.enter_context(running_platform(folder, received.url))
        targets = [*platform.targets, *([] if operator is None else [operator_target(operator)])]
        server = stack.enter_context(running_prometheus(folder / "prometheus", targets, RULES))
        load = Load(platform)
        with load.running():
            _run_queries(server, report, has_operator=operator is not None)
        report.num_answers = load.num_answers
        _check_scraped(server, report)
        _check_otlp(received, report)
    return report


def _operator(folder: Path, stack: contextlib.ExitStack, report: CheckReport) -> int | None:
    """Start an operator, and return the port of its metrics; None if this machine cannot."""
    try:
        return stack.enter_context(running_operator(folder / "operator"))
    except Unavailable as reason:
        report.skipped.append(f"operator: {reason}")
        return None


def _run_queries(server: PrometheusServer, report: CheckReport, *, has_operator: bool) -> None:
    """Run queries until all have data, or the limit is reached."""
    queries = [one for one in all_queries() if has_operator or not one.needs_operator]
    began_s = time.monotonic()
    time.sleep(LEAST_LOAD_S)
    waiting = queries
    while True:
        waiting = [query for query in waiting if not _has_data(server, query, report)]
        spent_s = time.monotonic() - began_s
        if not waiting or spent_s > LIMIT_S:
            break
        _say(f"after {spent_s:.0f} s, {len(waiting)} queries have no data")
        time.sleep(_AGAIN_S)
    report.without_data = waiting
    for query in waiting:
        _say(f"no data: {query.where}: {query.filled}")
    # Alerts as a whole return nothing while all is well, but Prometheus has to understand them.
    report.problems += [
        f"rule {rule['name']}: {rule['lastError']}"
        for rule in server.rules()
        if rule["health"] == "err"
    ]


def _has_data(server: PrometheusServer, query: CheckedQuery, report: CheckReport) -> bool:
    try:
        found = server.values(query.filled, LIMIT_S + LEAST_LOAD_S)
    except ValueError as error:
        report.problems.append(f"{query.where}: {error}")
        return True
    if any(not math.isnan(value) for values in found for value in values):
        return True
    return bool(found) and _MAY_BE_UNKNOWN in query.expression


def _check_scraped(server: PrometheusServer, report: CheckReport) -> None:
    """Compare what was scraped with the catalogue."""
    for target in server.targets():
        if target["health"] != "up":
            report.problems.append(f"{target['scrapeUrl']}: {target['lastError']}")
    found: dict[str, list[dict[str, str]]] = {}
    for labels in server.series('{job="ragcache"}'):
        found.setdefault(labels["__name__"], []).append(labels)
    ours = [name for name in found if name.startswith(OUR_PREFIXES)]
    report.undocumented += undocumented(ours, [one.name for one in RECORDINGS])
    for name in report.undocumented:
        _say(f"undocumented: {name}")
    for row in all_rows():
        scraped = [one for name in series_names(row) for one in found.get(name, ())]
        if not scraped:
            report.unseen_rows.append(row.prometheus_name)
        report.unbounded_labels += [
            f"{row.prometheus_name}: {problem}"
            for label in row.labels
            for problem in label_problems(label, scraped)
        ]
    for problem in report.unbounded_labels:
        _say(f"label: {problem}")
    exemplars = server.exemplars(series(gateway.TIME_TO_FIRST_TOKEN, suffix="_bucket"), LIMIT_S)
    report.num_exemplars = sum("trace_id" in labels for labels in exemplars)
    if not report.num_exemplars:
        report.problems.append("the histogram of the TTFT has no exemplars")


def label_problems(label: Label, scraped: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield where the values of a label differ from the catalogue.

    Args:
        scraped: Labels of series. Each pod may have as many of them as the catalogue allows.
    """
    by_pod: dict[str, set[str]] = {}
    for labels in scraped:
        # An empty value is the same as none in Prometheus.
        by_pod.setdefault(labels.get("pod", ""), set()).add(labels.get(label.prometheus_name, ""))
    for values in by_pod.values():
        if len(values) > label.max_values:
            yield f"{len(values)} values of {label.name}, at most {label.max_values} are allowed"
        if label.values and (others := values - set(label.values)):
            yield f"values of {label.name} that are not listed: {', '.join(sorted(others))}"


def _check_otlp(received: Collector, report: CheckReport) -> None:
    """Find which parts have exported metrics, which needs one interval."""
    deadline = time.monotonic() + _EXPORT_WAIT_S
    wanted = {f"ragcache-{part}" for part in ("gateway", "retriever", "engine", "cachestore")}
    while not wanted <= (parts := _parts_of(received)) and time.monotonic() < deadline:
        time.sleep(0.5)
    report.otlp_parts = sorted(parts)
    if missing := wanted - parts:
        report.problems.append(f"no metrics over OTLP from {', '.join(sorted(missing))}")


def _parts_of(received: Collector) -> set[str]:
    return {
        attribute.value.string_value
        for export in received.metrics()
        for of_resource in export.resource_metrics
        for attribute in of_resource.resource.attributes
        if attribute.key == "service.name"
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
