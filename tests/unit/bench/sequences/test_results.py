"""A run that was interrupted goes on with the requests that it has not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.sequences.figures import Measured
from bench.support.sequences.results import Results
from ragcache_wire.v1 import engine_pb2

SETTINGS = {"requests": 4, "sequence": "generated"}
RECORD = engine_pb2.RequestRecord(queue_s=0.25, loaded_tokens=7)


def measured(*times_s: float) -> list[Measured]:
    return [Measured(time_s, 100, 10, RECORD, 0.5) for time_s in times_s]


def interrupted(path: Path) -> None:
    results = Results(path, SETTINGS)
    results.add("plain", range(10, 12), measured(1.0, 2.0))
    results.add("blend", range(10, 12), measured(0.5, 1.5))
    results.add("plain", range(12, 13), [Measured(3.0, 100, 10)])


def test_the_measured_requests_are_known_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    interrupted(path)
    results = Results(path, SETTINGS)
    assert results.has("plain", range(10, 13))
    assert not results.has("blend", range(10, 13))
    wanted = range(10, 14)
    assert [results.first_missing(name, wanted) for name in ("plain", "blend", "exact")] == [
        13,
        12,
        10,
    ]
    assert results.first_missing("plain", range(10, 12)) == 12
    assert results.common(["plain", "blend"]) == {
        "plain": measured(1.0, 2.0),
        "blend": measured(0.5, 1.5),
    }
    results.add("blend", range(12, 13), measured(2.5))
    assert Results(path, SETTINGS).common(["plain", "blend"])["plain"][-1] == Measured(3.0, 100, 10)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    interrupted(path)
    path.write_text(path.read_text()[:-5])
    results = Results(path, SETTINGS)
    assert not results.has("plain", range(12, 13))
    results.add("plain", range(12, 13), measured(4.0))
    assert Results(path, SETTINGS).common(["plain"])["plain"] == measured(1.0, 2.0, 4.0)


def test_results_of_another_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results"
    interrupted(path)
    with pytest.raises(SystemExit, match="other settings"):
        Results(path, SETTINGS | {"requests": 5})


def test_without_a_file_results_are_kept_for_the_run() -> None:
    results = Results(None, SETTINGS)
    results.add("plain", range(2), measured(1.0, 2.0))
    assert results.common(["plain"]) == {"plain": measured(1.0, 2.0)}
