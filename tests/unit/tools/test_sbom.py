"""The bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from typing import Any, Final

import pytest
from packaging.utils import canonicalize_name

from tools.prose import ROOT
from tools.sbom import bill, closure

PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)
PINS: Final = {
    canonicalize_name(name): version
    for name, version in PIN.findall((ROOT / "constraints.txt").read_text())
}
UNPINNED: Final = {"torch", "setuptools", "importlib-resources"}
"""torch is pinned by tools/setup.sh, and the others come with Python's own tools."""


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    command = (sys.executable, "-m", "tools.sbom")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_pinned_dependency_is_listed_with_its_version(whole: dict[str, Any]) -> None:
    listed = {one["name"]: one["version"] for one in whole["components"]}
    assert {name: listed.get(name) for name in PINS if installed(name)} == {
        name: version for name, version in PINS.items() if installed(name)
    }
    assert listed.keys() - PINS.keys() <= UNPINNED


def test_each_component_is_identified_once_and_dependencies_exist(whole: dict[str, Any]) -> None:
    assert (whole["bomFormat"], whole["specVersion"], whole["version"]) == ("CycloneDX", "1.6", 1)
    own = whole["metadata"]["component"]
    references = [one["bom-ref"] for one in (own, *whole["components"])]
    assert len(set(references)) == len(references)
    assert own["name"] == "ragcache"
    assert all(one["purl"].startswith("pkg:pypi/") for one in whole["components"])
    assert [one["ref"] for one in whole["dependencies"]] == sorted(
        references, key=lambda one: one.split("/")[1].split("@")[0]
    )
    for one in whole["dependencies"]:
        assert set(one["dependsOn"]) <= set(references)


def test_a_part_has_its_own_dependencies_only() -> None:
    cachestore = closure(["cachestore"])
    assert "rocksdict" in cachestore
    assert not cachestore.keys() & {"fastapi", "torch", "kopf"}
    assert bill(cachestore) == bill(closure(["cachestore"])), "the same content, the same file"
