"""Panels of a dashboard, and their Grafana JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Json = dict[str, Any]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
GRID_WIDTH: Final = 24


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query of a panel.

    Attributes:
        legend: Grafana's legend, with labels as ``{{label}}``. Empty: one value without a name.
        exemplars: Whether Grafana asks for exemplars, which lead to traces.
    """

    expression: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        description: What it shows and what to do about it, for operators.
        unit: Unit of Grafana, like ``s``, ``bytes`` or ``percentunit``.
        width: Columns of 24.
        stacked: Whether series are areas on top of each other.
        maximum: Upper end of the axis.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bargauge"] = "timeseries"
    width: int = 12
    stacked: bool = False
    maximum: float | None = None

    @property
    def height(self) -> int:
        """Rows of the grid."""
        return 4 if self.kind == "stat" else 8

    def json(self, number: int, x: int, y: int) -> Json:
        """Return the panel at a position of the grid.

        Args:
            number: Id in the dashboard.
        """
        defaults: Json = {"unit": self.unit, "min": 0}
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.kind == "timeseries":
            defaults["custom"] = {
                "drawStyle": "line",
                "fillOpacity": 40 if self.stacked else 8,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none"},
            }
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
            "targets": [self._target(i, query) for i, query in enumerate(self.queries)],
        }

    def _options(self) -> Json:
        if self.kind == "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        options: Json = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "auto",
        }
        if self.kind == "stat":
            options |= {"colorMode": "value", "graphMode": "area", "textMode": "auto"}
        return options

    def _target(self, index: int, query: Query) -> Json:
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend or "__auto",
            "exemplar": query.exemplars,
            "range": True,
        }
