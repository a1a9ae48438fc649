"""Manifests for tests: valid ones, and bad ones that break one rule each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


class RejectedBy(Enum):
    """The first check that rejects a manifest on its way into a cluster. Later ones would too."""

    SCHEMA = "the OpenAPI schema, in every version of Kubernetes"
    CEL = "CEL, and the operator"
    OPERATOR = "the operator, in the status"
    PARSER = "the parser; API servers drop unknown fields first"


@dataclass(frozen=True, slots=True)
class Bad:
    """One bad manifest.

    field, problem, fix: what the parser or the rules say. server: what the API server calls the
    field where it says something else. old: what an update replaces; only CEL rejects updates.
    """

    name: str
    rejected_by: RejectedBy
    manifest: Object
    field: str
    problem: str
    fix: str
    server: str = ""
    old: Object | None = None

    @property
    def message(self) -> str:
        """The complete error message."""
        return f"{self.field}: {self.problem}; {self.fix}"


def examples() -> list[Object]:
    """Every RagCache and RagCollection of examples/."""
    return [
        document
        for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document["kind"] in ("RagCache", "RagCollection")
    ]


GOLDEN = Path(__file__).parents[1] / "unit" / "operator" / "builders" / "golden"
"""Folder with specs that set nearly every field, and with the objects that follow from them."""


def golden_specs() -> dict[str, Object]:
    """The specs of the golden files, by name."""
    return {
        path.name.partition(".")[0]: yaml.safe_load(path.read_text("utf-8"))
        for path in sorted(GOLDEN.glob("*.spec.yaml"))
    }


def cache(name: str = "docs", namespace: str = "", **spec: Any) -> Object:
    """Manifest of a RagCache."""
    where = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCache",
        "metadata": {"name": name, **where},
        "spec": spec,
    }


def collection(name: str = "handbook", **changes: Any) -> Object:
    """Manifest of a RagCollection. ``changes`` are fields of its spec; None leaves a field out."""
    spec = {"cacheRef": {"name": "docs"}, "sources": [{"configMap": {"name": "pages"}}], **changes}
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCollection",
        "metadata": {"name": name},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def source(**given: Any) -> Object:
    """Manifest of a RagCollection with one source."""
    return collection(sources=[given])


def external(**more: Any) -> Object:
    """Manifest with an engine that RagCache does not run."""
    return cache(engines=[{"url": "http://vllm.models.svc:8000", **more}])


def _bad(case: Object) -> Bad:
    [check] = [one for one in RejectedBy if one.name.lower() in case]
    whole = collection() if case.get("kind") == "RagCollection" else cache()
    whole["metadata"] |= case.get("metadata", {})
    field, problem, fix = case["says"]
    return Bad(
        name=case[check.name.lower()],
        rejected_by=check,
        manifest=whole | {"spec": case["spec"]},
        field=field,
        problem=problem,
        fix=fix,
        server=case.get("server", ""),
        old=whole | {"spec": case["old"]} if "old" in case else None,
    )


BAD: tuple[Bad, ...] = tuple(
    map(_bad, yaml.safe_load((Path(__file__).parent / "bad_manifests.yaml").read_text("utf-8")))
)
