"""The metrics catalogue: names, bounds, and that parts record exactly what it lists."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.schemas import Schemas

from ragcache_wire.telemetry import semantic_conventions
from ragcache_wire.telemetry.catalogue import PARTS, all_rows, rows_of
from ragcache_wire.telemetry.instrument import Instrument, InstrumentKind, counter, histogram

ROOT = Path(__file__).resolve().parents[4]
PRODUCT = ("wire", "kv", "services", "operator")
CATALOGUE = ROOT / "wire" / "ragcache_wire" / "telemetry" / "catalogue"
MAX_SERIES = 2048
"""Most series of one instrument in one process, without the buckets of a histogram."""
CREATORS = {
    "wire/ragcache_wire/telemetry/metric_registry.py",
    # vLLM gives the classes to create.
    "services/engine/ragcache_engine/telemetry/metrics.py",
}

every_row = pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)


def product_files() -> list[Path]:
    found = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if CATALOGUE not in path.parents]


@every_row
def test_names_are_valid_in_both_systems(row: Instrument) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_.:]*", row.name)
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", row.prometheus_name)
    assert len(set(row.label_names)) == len(row.label_names)
    for label in row.label_names:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", label)
    assert row.description.endswith(".")


@every_row
def test_the_number_of_series_is_bounded(row: Instrument) -> None:
    assert math.prod(label.max_values for label in row.labels) <= MAX_SERIES
    for label in row.labels:
        assert label.values or label.meaning


@every_row
def test_buckets_ascend(row: Instrument) -> None:
    assert list(row.buckets) == sorted(set(row.buckets))
    assert bool(row.buckets) == (
        row.kind is InstrumentKind.HISTOGRAM and row not in rows_of("standard").values()
    )


def test_no_name_is_used_twice() -> None:
    for names in (
        [row.name for row in all_rows()],
        [row.prometheus_name for row in all_rows()],
    ):
        assert len(set(names)) == len(names)


def test_prometheus_names_follow_opentelemetrys_rules() -> None:
    assert counter("a.b", "By", "x").prometheus_name == "a_b_bytes_total"
    assert counter("a.seconds", "s", "x").prometheus_name == "a_seconds_total"
    assert histogram("a.b", "s", "x", buckets=(1.0,)).prometheus_name == "a_b_seconds"
    assert counter("a.b", "{token}", "x").prometheus_name == "a_b_total"


def test_names_of_generative_ai_are_those_of_one_version_of_the_conventions() -> None:
    assert Schemas.V1_44_0.value == semantic_conventions.SCHEMA_URL
    known = {
        value
        for module in (gen_ai_metrics, gen_ai_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    ours = {
        value
        for value in vars(semantic_conventions).values()
        if isinstance(value, str) and value.startswith("gen_ai.")
    }
    assert len(ours) == 25
    assert ours <= known


@pytest.mark.parametrize("part", PARTS)
def test_every_row_is_recorded(part: str) -> None:
    """Each row is used as ``rows.NAME`` in a module that imports the part's catalogue."""
    used: set[str] = set()
    for path in product_files():
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if not any(
            one.module == "ragcache_wire.telemetry.catalogue"
            and any(alias.name == part and alias.asname == "rows" for alias in one.names)
            for one in imports
        ):
            continue
        used |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "rows"
        }
    assert rows_of(part).keys() == used


def test_no_module_makes_instruments_of_its_own() -> None:
    kinds = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
    makers = set()
    for path in product_files():
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "prometheus_client"
            for alias in node.names
            if alias.name in kinds
        }
        calls = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        meters = any(
            isinstance(node, ast.Attribute) and node.attr in {"get_meter", "create_counter"}
            for node in ast.walk(tree)
        )
        if names & calls or meters:
            makers.add(str(path.relative_to(ROOT)))
    assert makers <= CREATORS


def test_all_known_series_of_a_row_are_listed() -> None:
    row = rows_of("cachestore")["HITS"]
    assert len(list(row.known_series())) == 6
    assert not list(rows_of("gateway")["REQUESTS"].known_series())
    assert not list(rows_of("cachestore")["DELETIONS"].known_series())
