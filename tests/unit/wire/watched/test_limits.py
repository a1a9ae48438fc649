"""Limits that change while a gateway runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache_wire.watched.limits import FileLimits, GatewayLimits, limits_json
from tests.kit.clock import ManualClock

DEFAULT = GatewayLimits(128, 64, 120.0, 60.0, 4096)


def test_limits_follow_the_file_and_keep_what_it_leaves_out(tmp_path: Path) -> None:
    path, clock = tmp_path / "limits.json", ManualClock()
    limits = FileLimits(path, DEFAULT, clock)
    assert limits.current() == DEFAULT
    path.write_text(json.dumps({"questions": 7}))
    clock.now += 2
    assert limits.current() == replace(DEFAULT, questions=7)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"questions": 0}', '{"questions": true}', '{"connections": "9"}']
)
def test_a_wrong_file_keeps_the_last_limits(tmp_path: Path, content: str) -> None:
    path, clock = tmp_path / "limits.json", ManualClock()
    wanted = replace(DEFAULT, document_requests=3, next_token_timeout_s=5.0)
    path.write_text(limits_json(wanted))
    limits = FileLimits(path, DEFAULT, clock)
    assert limits.current() == wanted
    path.write_text(content)
    clock.now += 2
    assert limits.current() == wanted
