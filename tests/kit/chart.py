"""Renders the chart with Helm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "charts" / "ragcache-operator"
RELEASE = "ragcache-operator"
NAMESPACE = "ragcache-system"

Object = dict[str, Any]


def render(
    values: Object | None = None, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Object]:
    """Return the rendered objects."""
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace=namespace)
    return [
        obj
        for path, text in files.items()
        if not path.endswith("NOTES.txt")
        for obj in yaml.safe_load_all(text)
        if obj
    ]


def of(objects: list[Object], kind: str, name: str = "") -> Object:
    """Return the only object of a kind, or the one with a name."""
    [found] = [
        obj
        for obj in objects
        if obj["kind"] == kind and (not name or obj["metadata"]["name"] == name)
    ]
    return found
