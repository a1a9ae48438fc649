"""The objects of three specs, compared with golden files.

``python -m tests.unit.operator.builders.test_golden`` writes the files again after a change that is
meant. NetworkPolicies are not in them, because their tests ask which connections are open.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ragcache_operator.builders.metadata import SPEC_HASH
from tests.kit.manifests import GOLDEN, golden_specs
from tests.kit.operator import Object, build

SPECS = golden_specs()


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


@pytest.mark.parametrize("name", SPECS)
def test_the_objects_of_a_spec_are_as_recorded(name: str) -> None:
    assert golden(SPECS[name]) == (GOLDEN / f"{name}.golden.yaml").read_text("utf-8")


if __name__ == "__main__":
    for given, found in SPECS.items():
        (GOLDEN / f"{given}.golden.yaml").write_text(golden(found), "utf-8")
