"""A dashboard, and its Grafana JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_wire.telemetry.instrument import Instrument
from tools.dashboards.panel import DATASOURCE, GRID_WIDTH, Json, Panel

TAG: Final = "ragcache"
SCHEMA_VERSION: Final = 39
"""Of Grafana 11. Later versions upgrade a dashboard when they load it."""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one headline."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard.

    Attributes:
        name: Name of its file, and part of its uid.
        scope: An instrument whose series have the labels that the variables choose from. None: the
            dashboard has no variables.
    """

    name: str
    title: str
    description: str
    sections: Sequence[Section]
    scope: Instrument | None

    @property
    def panels(self) -> list[Panel]:
        """All panels."""
        return [panel for section in self.sections for panel in section.panels]

    def json(self) -> Json:
        """Return what Grafana imports."""
        return {
            "uid": f"ragcache-{self.name}",
            "title": f"RagCache / {self.title}",
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "type": "dashboards",
                    "title": "RagCache",
                    "tags": [TAG],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {"list": list(self._variables())},
            "annotations": {"list": []},
            "panels": list(self._placed()),
        }

    def _variables(self) -> Iterator[Json]:
        yield {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
        }
        if self.scope is None:
            return
        name = self.scope.prometheus_name
        yield _variable("namespace", "Namespace", f"label_values({name}, namespace)")
        chosen = f'{name}{{namespace=~"$namespace"}}'
        yield _variable("ragcache", "RagCache", f"label_values({chosen}, ragcache)")

    def _placed(self) -> Iterator[Json]:
        number, y = 0, 0
        for section in self.sections:
            number += 1
            yield {
                "id": number,
                "type": "row",
                "title": section.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
                "panels": [],
            }
            y, x, line = y + 1, 0, 0
            for panel in section.panels:
                if x + panel.width > GRID_WIDTH:
                    y, x, line = y + line, 0, 0
                number += 1
                yield panel.json(number, x, y)
                x, line = x + panel.width, max(line, panel.height)
            y += line


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
