"""The objects of three specs, compared with golden files.

``python -m tests.unit.operator.builders.test_golden`` writes the files again after a change that is
meant. NetworkPolicies are not in them, because their tests ask which connections are open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ragcache_operator.builders.metadata import SPEC_HASH
from tests.kit.operator import Object, build

FOLDER = Path(__file__).parent / "golden"
SPECS = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.spec.yaml"))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def golden(spec: Object) -> str:
    """Return the objects of a spec as text, without what the tests of all children check."""
    children = [child for child in build(**spec) if child["kind"] != "NetworkPolicy"]
    return yaml.dump_all(
        map(_distinctive, children), Dumper=_Dumper, default_flow_style=None, width=120
    )


def _distinctive(value: Any) -> Any:
    """Return a value without owners, hashes, security contexts and our common labels."""
    if isinstance(value, list):
        return [_distinctive(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _distinctive(item)
        for key, item in value.items()
        if key not in ("ownerReferences", "securityContext", SPEC_HASH)
        and not str(key).startswith("app.kubernetes.io/")
    }


def read_spec(name: str) -> Object:
    spec: Object = yaml.safe_load((FOLDER / f"{name}.spec.yaml").read_text("utf-8"))
    return spec


@pytest.mark.parametrize("name", SPECS)
def test_the_objects_of_a_spec_are_as_recorded(name: str) -> None:
    assert golden(read_spec(name)) == (FOLDER / f"{name}.golden.yaml").read_text("utf-8")


if __name__ == "__main__":
    for given in SPECS:
        (FOLDER / f"{given}.golden.yaml").write_text(golden(read_spec(given)), "utf-8")
