"""Manifests: defaults, and problems with path and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import parse_duration
from ragcache_operator.spec.manifest import (
    InvalidManifest,
    load_manifest,
    parse,
    parse_collection,
    parse_manifest,
)
from ragcache_operator.spec.ragcache import ModelSource
from tests.kit.manifests import cache, collection, examples

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_an_empty_spec_is_a_whole_platform() -> None:
    spec = parse_manifest(cache()).spec
    assert spec.model.served_name == "smollm2"
    assert spec.gateway.port == 8080
    assert [engine.name for engine in spec.engines] == ["main"]
    assert spec.engines[0].rank_kv_gib == 2
    assert spec.cache_store.memory_bytes == 1 << 30
    assert (spec.reuse.mode, spec.reuse.max_recompute_share) == ("exact", 0.2)


@pytest.mark.parametrize("example", examples(), ids=lambda one: one["metadata"]["name"])
def test_examples_are_valid(example: dict[str, Any]) -> None:
    parse(example)


@pytest.mark.parametrize("name", ["quickstart.yaml", "huggingface.yaml"])
def test_examples_that_run_on_one_machine_hold_one_ragcache(name: str) -> None:
    load_manifest(EXAMPLES / name)


def test_nulls_and_status_are_ignored() -> None:
    given = cache(model=None, gateway={"port": None}) | {"status": {"conditions": []}}
    assert parse_manifest(given) == parse_manifest(cache())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("bundled:tinyrag", "tinyrag"),
        ("bundled:smollm2", "smollm2"),
        ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        (f"hf:Qwen/Qwen3-0.6B@{'0' * 40}", "Qwen/Qwen3-0.6B"),
        ("path:/models/llama", "llama"),
        ("path:/models/llama/", "llama"),
        ("path:.", "model"),
        ("pvc:models", "models"),
        ("pvc:models/llama-8b/", "llama-8b"),
        ("image:registry.example.com:5000/models/llama:8b", "llama"),
        ("image:models/llama@sha256:0123", "llama"),
    ],
)
def test_served_name_follows_the_source(source: str, name: str) -> None:
    assert parse_manifest(cache(model={"source": source})).spec.model.served_name == name


@pytest.mark.parametrize(
    ("source", "claim", "folder"),
    [
        ("pvc:models", "models", ""),
        ("pvc:team.models/llama-8b/", "team.models", "llama-8b"),
        ("pvc:models/.cache/llama", "models", ".cache/llama"),
    ],
)
def test_a_claim_and_a_folder_in_it(source: str, claim: str, folder: str) -> None:
    parsed = ModelSource.parse(source)
    assert (parsed.claim, parsed.folder) == (claim, folder)


def test_a_collection_is_named_after_its_object_by_default() -> None:
    assert parse_collection(collection("handbook")).collection_name == "handbook"
    assert parse_collection(collection(collection="manual")).collection_name == "manual"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"configMap": {"name": "c"}}, "configMap"),
        ({"volume": {"claimName": "c"}}, "volume"),
        ({"http": {"url": "https://example.com/a.zip"}}, "http"),
        ({"git": {"url": "https://example.com/a.git"}}, "git"),
    ],
)
def test_a_source_has_one_kind(given: dict[str, Any], kind: str) -> None:
    [source] = parse_collection(collection(sources=[given])).spec.sources
    assert source.kind == kind


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1h1s", 3601), ("0m", 0)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "30m1h", "1d", "1.5h", "-5m", "5M"])
def test_text_that_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


BAD_SPECS = {
    "spec.model.max_length: unknown field; did you mean maxLength?": {"model": {"max_length": 9}},
    "spec.cachestore: unknown field; did you mean cacheStore?": {"cachestore": {}},
    "spec.podTemplate.topologySpreadConstraints[0].maxskew: unknown field; did you mean maxSkew?": {
        "podTemplate": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxskew": 2}]}
    },
    "spec.engines[0].kvmemory: unknown field; did you mean kvMemory?": {
        "engines": [{"kvmemory": "1Gi"}]
    },
    "spec.gateway.zebra: unknown field; the fields here are port, adminPort, auth, oidc, tls, "
    "audit, replicas, autoscaling, resources, limits, slo, order, maxDisplacement, reordering, "
    "layout, speculation, rewrite, console, allowedHosts, allowedOrigins, ingress, "
    "httpRoute, service, podTemplate": {"gateway": {"zebra": True}},
    "spec.gateway.autoscaling.maxReplica: unknown field; did you mean maxReplicas?": {
        "gateway": {"autoscaling": {"maxReplicas": 2, "maxReplica": 2}}
    },
    "spec.networkPolicy.clients[0].podSelector.matchLabel: unknown field; "
    "did you mean matchLabels?": {
        "networkPolicy": {"clients": [{"podSelector": {"matchLabel": {}}}]}
    },
    "spec.podTemplate.nodeSelector: [] is not a mapping; write a mapping": {
        "podTemplate": {"nodeSelector": []}
    },
    "spec.podTemplate.nodeSelector.disk: 1 is not a string; write a string": {
        "podTemplate": {"nodeSelector": {"disk": 1}}
    },
    "spec.gateway.port: True is not an integer; write an integer, without quotes": {
        "gateway": {"port": True}
    },
    "spec.cacheStore.memory: 0 is not above zero; write a value like 512Mi or 2Gi": {
        "cacheStore": {"memory": 0}
    },
    "spec.cacheStore.disk.size: '[]' is not a quantity; "
    "write bytes as a Kubernetes quantity, like 512Mi or 2Gi": {
        "cacheStore": {"disk": {"size": []}}
    },
    "spec.reuse.max_recompute_share: unknown field; did you mean maxRecomputeShare?": {
        "reuse": {"max_recompute_share": 0.1}
    },
    "spec.reuse.maxRecomputeShare: True is not a number; write a number, without quotes": {
        "reuse": {"maxRecomputeShare": True}
    },
    "spec.reuse.maxRecomputeShare: nan is not a number; write a number, without quotes": {
        "reuse": {"maxRecomputeShare": float("nan")}
    },
    "spec.engines[1].name: 'a' is used twice; use a different name": {
        "engines": [{"name": "a"}, {"name": "a"}]
    },
    "spec.engines[0].args: '--x' is not a list; write a list": {"engines": [{"args": "--x"}]},
}


@pytest.mark.parametrize(("message", "spec"), BAD_SPECS.items(), ids=range(len(BAD_SPECS)))
def test_a_problem_has_path_and_fix(message: str, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest) as error:
        parse_manifest(cache(**spec))
    assert str(error.value) == message
    [problem] = error.value.problems
    assert (problem.field, problem.fix) == (error.value.field, error.value.fix)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(InvalidManifest) as error:
        parse_manifest({"kind": "RagCash", "metadata": {"name": "Docs"}, "spec": {"gatway": {}}})
    assert [problem.field for problem in error.value.problems] == [
        "apiVersion",
        "kind",
        "metadata.name",
        "spec.gatway",
    ]


def test_only_the_current_version_is_allowed() -> None:
    with pytest.raises(
        InvalidManifest, match=r"^apiVersion: 'ragcache.dev/v1' is not allowed; use"
    ):
        parse_manifest(cache() | {"apiVersion": "ragcache.dev/v1"})


YAML_HEAD = "apiVersion: ragcache.dev/v1alpha1\nkind: RagCache\nmetadata: {name: docs}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [", r"docs.yaml:1: is not valid YAML"),
        (YAML_HEAD + "spec:\n\tgateway: {}", r"docs.yaml:5: is not valid YAML: found character"),
        (
            YAML_HEAD + "spec:\n  gateway: {port: 1}\n  gateway: {port: 2}\n",
            r"docs.yaml:6: is not valid YAML: the key 'gateway' is given twice",
        ),
        ("", r"docs.yaml: contains no RagCache; see examples/quickstart.yaml"),
        ("- a", r"docs.yaml: is not a mapping"),
        ("kind: ConfigMap", r"apiVersion: is missing"),
        (
            f"{YAML_HEAD}---\n{YAML_HEAD}",
            r"contains 2 RagCache objects; put each into a separate file",
        ),
        (
            f"{YAML_HEAD}---\nkind: ConfigMap\n",
            r"contains a ConfigMap besides the RagCache; move it to a separate file",
        ),
        ("kind: A\n---\nkind: B\n", r"contains no RagCache"),
        ("a: &a [*a]", r"docs.yaml:1: is not valid YAML: the alias \*a is not supported"),
        ("a: !!python/object:os.system {}", r"docs.yaml:1: is not valid YAML: could not determine"),
        ("? [a]\n: b", r"docs.yaml:1: is not valid YAML: found unhashable key"),
        ("\ud800", r"docs.yaml: is not valid YAML"),
        ("\x00", r"docs.yaml: is not valid YAML"),
        ("1: 2", r"apiVersion: is missing"),
        ("[" * 5000, r"docs.yaml: is nested too deeply"),
    ],
)
def test_an_invalid_file_is_reported_with_its_position(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "docs.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InvalidInput, match=message):
        load_manifest(path)


def test_empty_documents_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "docs.yaml"
    path.write_text(f"---\n---\n{YAML_HEAD}---\n")
    assert load_manifest(path).metadata.name == "docs"


def test_a_missing_or_too_large_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        load_manifest(tmp_path / "missing.yaml")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        load_manifest(tmp_path)
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(InvalidInput, match="is over 1 MiB"):
        load_manifest(tmp_path / "large.yaml")


def test_a_manifest_has_the_kind_that_it_names() -> None:
    assert parse(cache()) == parse_manifest(cache())
    assert parse(collection()) == parse_collection(collection())
    with pytest.raises(InvalidManifest, match=r"^kind: 'RagCollection' is not allowed; use"):
        parse_manifest(collection())


def test_missing_fields_of_a_collection_are_shown_by_example() -> None:
    with pytest.raises(InvalidManifest) as error:
        parse_collection({"kind": "RagCollection", "spec": {}})
    assert [str(problem) for problem in error.value.problems] == [
        "apiVersion: is missing; write apiVersion: ragcache.dev/v1alpha1",
        "metadata: is missing; write metadata: {name: my-name}",
        "spec.cacheRef: is missing; write cacheRef: {name: my-cache}, the RagCache that stores "
        "the documents",
        "spec.sources: is missing; write sources: [{configMap: {name: my-documents}}], or another "
        "source",
    ]
