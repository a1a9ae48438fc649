"""Where a cluster cannot run, its tests say why, and CI does not take that for success."""

from __future__ import annotations

import pytest

from harness import packages
from harness.availability import Unavailable, skip
from harness.packages import Package

MISSING = (Package("python3", "python3"), Package("no-such-package", "/no/such/file"))


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(Unavailable, match=r"apt-get install no-such-package$|no Debian"):
        packages.require(MISSING)


def test_a_test_that_cannot_run_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no root here"):
        skip(Unavailable("no root here"))


def test_under_ci_a_test_that_cannot_run_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no root here"):
        skip(Unavailable("no root here"))
