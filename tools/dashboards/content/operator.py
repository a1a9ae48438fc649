"""The operator: reconcile passes, writes, and its leader."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import operator, standard
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import quantile, rate, series, total

_PODS: Final = 'component="operator"'

DASHBOARD: Final = Dashboard(
    "operator",
    "Operator",
    "Reconcile passes, written objects, and which replica leads.",
    [
        Section(
            "Reconciling",
            [
                Panel(
                    "Reconcile passes",
                    "By kind and outcome. An unchanged object needs no passes.",
                    [
                        Query(
                            total(rate(operator.RECONCILE, suffix="_count"), "kind", "outcome"),
                            "{{kind}} {{outcome}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    "Time of a pass, p95",
                    "By kind.",
                    [
                        Query(
                            quantile(0.95, operator.RECONCILE, by=("kind",)),
                            "{{kind}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Written objects",
                    "By kind. Repeated writes of one kind mean that another controller changes it.",
                    [Query(total(rate(operator.APPLIES), "kind"), "{{kind}}")],
                    unit="ops",
                ),
                Panel(
                    "Leader",
                    "1 for the replica that reconciles.",
                    [Query(series(operator.LEADING), "{{pod}}")],
                    maximum=1,
                ),
                Panel(
                    "Memory",
                    "Resident memory by pod.",
                    [Query(series(standard.PROCESS_MEMORY, _PODS), "{{pod}}")],
                    unit="bytes",
                ),
                Panel(
                    "CPU",
                    "Cores by pod.",
                    [Query(rate(standard.PROCESS_CPU, _PODS), "{{pod}}")],
                ),
            ],
        )
    ],
    None,
)
