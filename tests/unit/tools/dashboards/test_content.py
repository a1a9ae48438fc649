"""Dashboards and rules as files, without a Prometheus."""

from __future__ import annotations

import json
import re

import pytest

from ragcache_wire.telemetry.catalogue import gateway, rows_of
from ragcache_wire.telemetry.instrument import at_most, one_of
from tools.dashboards.check import (
    all_queries,
    label_problems,
    static_problems,
    undocumented_names,
)
from tools.dashboards.content import DASHBOARDS
from tools.dashboards.dashboard import Dashboard
from tools.dashboards.files import FOLDER, ROOT
from tools.dashboards.grafana_schema import schema_problems
from tools.dashboards.metric_names import names_in, series_names, undocumented
from tools.dashboards.rules import ALERTS, FIRST_TOKEN_OBJECTIVE_S, WINDOWS

every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)


def test_the_files_are_fresh_and_every_name_is_documented() -> None:
    assert static_problems() == []
    assert undocumented_names() == []


def test_the_catalogue_has_only_those_metrics_of_others_that_are_queried() -> None:
    queried = {name for query in all_queries() for name in names_in(query.expression)}
    rows = rows_of("standard").values()
    assert [row.name for row in rows if not queried & set(series_names(row))] == []


@every_dashboard
def test_panels_neither_overlap_nor_leave_the_grid(dashboard: Dashboard) -> None:
    content = json.loads((FOLDER / f"{dashboard.name}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in content["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])


@every_dashboard
def test_the_schema_refuses_what_grafana_would_ignore(dashboard: Dashboard) -> None:
    content = dashboard.json()
    assert schema_problems(content) == []
    content["panels"][1]["targets"][0]["query"] = "up"
    assert schema_problems(content)


def test_names_are_found_among_functions_labels_and_numbers() -> None:
    expression = (
        'histogram_quantile(0.5, sum by (le, stage) (rate(a_bucket{b="c"}[5m]))) / '
        "ignoring (stage) group_left sum(d) + 2 * e:f == +Inf or vector(1)"
    )
    assert names_in(expression) == {"a_bucket", "d", "e:f"}
    assert undocumented(["ragcache_gateway_requests_total", "unheard", "e:f"], ["e:f"]) == [
        "unheard"
    ]


def test_alerts_have_a_runbook_each_and_no_runbook_is_left_over() -> None:
    pages = {path.name for path in (ROOT / "docs" / "runbooks").glob("*.md")} - {"README.md"}
    assert pages == {f"{alert.name}.md" for alert in ALERTS}
    index = (ROOT / "docs" / "runbooks" / "README.md").read_text()
    assert all(f"({alert.name}.md)" in index for alert in ALERTS)


def test_runbooks_name_dashboards_and_panels_that_exist() -> None:
    known = {dashboard.title.rpartition(" / ")[2] for dashboard in DASHBOARDS}
    known |= {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels}
    named: set[str] = set()
    for page in (ROOT / "docs" / "runbooks").glob("*.md"):
        named |= set(re.findall(r"(?<![*])[*]([^*\n]+)[*](?![*])", page.read_text()))
    assert len(named) > 5
    assert named <= known


def test_the_objective_of_the_first_token_is_a_bucket() -> None:
    assert FIRST_TOKEN_OBJECTIVE_S in gateway.TIME_TO_FIRST_TOKEN.buckets


def test_burn_rates_compare_a_long_window_with_a_short_one() -> None:
    burning = [alert for alert in ALERTS if "Burn" in alert.name]
    assert len(burning) == 4
    for alert in burning:
        long, short = (one.value.rpartition("rate")[2] for one in alert.conditions)
        assert WINDOWS.index(long) > WINDOWS.index(short)


def test_labels_beyond_their_bounds_are_reported_by_pod() -> None:
    few = at_most("engine", 1, "address")
    two_pods = [{"pod": "a", "engine": "x"}, {"pod": "b", "engine": "y"}]
    assert not list(label_problems(few, two_pods))
    assert list(label_problems(few, [{"pod": "a", "engine": one} for one in "xy"]))
    tiers = one_of("tier", "memory")
    assert list(label_problems(tiers, [{"pod": "a", "tier": "tape"}]))
