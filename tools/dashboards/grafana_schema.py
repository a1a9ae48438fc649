"""The part of Grafana's dashboard model that the dashboards use, as a JSON Schema.

Grafana ignores unknown fields silently, so the schema refuses them.
"""

from __future__ import annotations

from typing import Any, Final

from jsonschema import Draft202012Validator

from tools.dashboards.dashboard import SCHEMA_VERSION
from tools.dashboards.panel import GRID_WIDTH

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_FILLED: Final[Schema] = {"type": "string", "minLength": 1}
_FLAG: Final[Schema] = {"type": "boolean"}


def _object(required: dict[str, Any], **optional: Any) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **optional},
        "additionalProperties": False,
    }


def _choice(*values: str) -> Schema:
    return {"enum": list(values)}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


_DATASOURCE = _object({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
_POSITION = _object(
    {
        "x": {"type": "integer", "minimum": 0, "maximum": GRID_WIDTH - 1},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": GRID_WIDTH},
        "h": {"type": "integer", "minimum": 1},
    }
)
_CUSTOM = _object(
    {
        "drawStyle": _choice("line", "bars", "points"),
        "fillOpacity": {"type": "integer", "minimum": 0, "maximum": 100},
        "lineWidth": {"type": "integer", "minimum": 0, "maximum": 10},
        "showPoints": _choice("auto", "never", "always"),
        "stacking": _object({"mode": _choice("none", "normal", "percent")}),
    }
)
_FIELDS = _object(
    {
        "defaults": _object(
            {"unit": _FILLED, "min": {"type": "number"}},
            max={"type": "number"},
            custom=_CUSTOM,
        ),
        "overrides": _list({}, maxItems=0),
    }
)
_OPTIONS = _object(
    {},
    legend=_object(
        {
            "displayMode": _choice("list", "table", "hidden"),
            "placement": _choice("bottom", "right"),
            "showLegend": _FLAG,
        }
    ),
    tooltip=_object(
        {"mode": _choice("single", "multi", "none"), "sort": _choice("asc", "desc", "none")}
    ),
    reduceOptions=_object({"calcs": _list(_FILLED, minItems=1), "fields": _TEXT, "values": _FLAG}),
    orientation=_choice("auto", "horizontal", "vertical"),
    colorMode=_choice("none", "value", "background"),
    graphMode=_choice("none", "area"),
    textMode=_choice("auto", "value", "value_and_name", "name", "none"),
)
_TARGET = _object(
    {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": _DATASOURCE,
        "expr": _FILLED,
        "legendFormat": _TEXT,
        "exemplar": _FLAG,
        "range": _FLAG,
    }
)
_ROW = _object(
    {
        "id": {"type": "integer"},
        "type": {"const": "row"},
        "title": _FILLED,
        "collapsed": _FLAG,
        "gridPos": _POSITION,
        "panels": _list({}, maxItems=0),
    }
)
_PANEL = _object(
    {
        "id": {"type": "integer"},
        "type": _choice("timeseries", "stat", "bargauge"),
        "title": _FILLED,
        "description": _FILLED,
        "datasource": _DATASOURCE,
        "gridPos": _POSITION,
        "fieldConfig": _FIELDS,
        "options": _OPTIONS,
        "targets": _list(_TARGET, minItems=1, maxItems=26),
    }
)
_VARIABLE = _object(
    {"name": _FILLED, "label": _FILLED, "type": _choice("datasource", "query")},
    query={"anyOf": [_FILLED, _object({"query": _FILLED, "refId": _FILLED})]},
    datasource=_DATASOURCE,
    definition=_FILLED,
    refresh={"enum": [0, 1, 2]},
    sort={"type": "integer", "minimum": 0, "maximum": 8},
    multi=_FLAG,
    includeAll=_FLAG,
    allValue=_TEXT,
    current=_object({"text": _list(_TEXT), "value": _list(_TEXT)}),
)
_LINK = _object(
    {
        "type": _choice("dashboards", "link"),
        "title": _FILLED,
        "tags": _list(_FILLED),
        "asDropdown": _FLAG,
        "includeVars": _FLAG,
        "keepTime": _FLAG,
    }
)
DASHBOARD_SCHEMA: Final = _object(
    {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": _FILLED,
        "description": _FILLED,
        "tags": _list(_FILLED),
        "schemaVersion": {"const": SCHEMA_VERSION},
        "version": {"type": "integer"},
        "editable": _FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "time": _object({"from": _FILLED, "to": _FILLED}),
        "timezone": _choice("browser", "utc"),
        "links": _list(_LINK),
        "templating": _object({"list": _list(_VARIABLE)}),
        "annotations": _object({"list": _list({}, maxItems=0)}),
        "panels": _list({"anyOf": [_ROW, _PANEL]}, minItems=1),
    }
)


def schema_problems(content: Any) -> list[str]:
    """Return what of a dashboard Grafana would not understand."""
    found = Draft202012Validator(DASHBOARD_SCHEMA).iter_errors(content)
    return [f"{error.json_path}: {error.message}" for error in found]
