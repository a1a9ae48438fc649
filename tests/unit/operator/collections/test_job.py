"""The Jobs of a RagCollection, and their outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.collections.job import (
    COLLECTION_LABEL,
    OUTCOME,
    SyncTarget,
    format_time,
    is_removal,
    key_secret,
    parse_time,
    read_job,
    removal_job,
    sync_job,
)
from ragcache_operator.collections.outcome import Outcome, outcome_of, waiting_reason
from ragcache_operator.collections.revision import Revision, revision_of
from ragcache_operator.kube.resources import Object
from ragcache_operator.spec.collection import RagCollection
from ragcache_operator.spec.manifest import parse_collection
from ragcache_operator.spec.ragcache import RagCache
from tests.kit.operator import make_cache

EVERY_KIND: list[Object] = [
    {"configMap": {"name": "faq"}},
    {"volume": {"claimName": "manuals", "path": "published"}},
    {
        "http": {
            "url": "https://example.com/a.zip",
            "bearerSecret": {"name": "web", "key": "bearer"},
        }
    },
    {"git": {"url": "https://example.com/r.git", "ref": "v1", "bearerSecret": {"name": "git"}}},
]


def collection(*sources: Object, **spec: Any) -> RagCollection:
    return parse_collection(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCollection",
            "metadata": {"name": "faq", "namespace": "team"},
            "spec": {
                "cacheRef": {"name": "docs"},
                "sources": list(sources) or EVERY_KIND,
                **spec,
            },
        }
    )


def target_of(given: RagCollection, cache: RagCache) -> SyncTarget:
    image, served = "example.com/tools:1", Capabilities.latest()
    return SyncTarget(given, "uid-1", cache, image, "http://gateway", served)


def job(
    given: RagCollection | None = None,
    *,
    attempt: int = 0,
    after: str = "",
    claims: tuple[str, ...] = ("manuals",),
    **cache_spec: Any,
) -> Object:
    target = target_of(given or collection(), make_cache(**cache_spec))
    return sync_job(target, Revision("aaaa", "bbbb"), attempt, after, 1_800_000_000.25, claims)


def removal(**cache_spec: Any) -> Object:
    return removal_job(target_of(collection(), make_cache(**cache_spec)))


def container(made: Object) -> Object:
    found: Object = made["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("made", [job(), removal()])
def test_jobs_are_valid_objects(made: Object, version: str) -> None:
    kubernetes_validate.validate(made, version, strict=True)


@pytest.mark.parametrize("made", [job(), removal()])
def test_pods_are_restricted_and_without_permissions(made: Object) -> None:
    pod = made["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container(made)["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_the_command_gets_its_object() -> None:
    given = collection()
    arguments = container(job(given))["args"]
    manifest = json.loads(arguments[arguments.index("--object") + 1])
    assert parse_collection(manifest) == given


def test_sources_are_mounted_read_only_and_missing_ones_block_no_pod() -> None:
    made = job()
    volumes = {v["name"]: v for v in made["spec"]["template"]["spec"]["volumes"]}
    assert volumes["source-0"]["configMap"] == {"name": "faq", "optional": True}
    claim = {"claimName": "manuals", "readOnly": True}
    assert volumes["source-1"]["persistentVolumeClaim"] == claim
    mounts = {m["name"]: m for m in container(made)["volumeMounts"]}
    assert mounts["source-0"]["mountPath"] == "/sources/source-0"
    assert mounts["source-0"]["readOnly"] is True
    assert mounts["source-1"]["readOnly"] is True
    without = job(claims=())
    assert [v["name"] for v in without["spec"]["template"]["spec"]["volumes"]] == [
        "scratch",
        "source-0",
    ]


def test_tokens_are_references_and_never_values() -> None:
    variables = {v["name"]: v for v in container(job())["env"]}
    assert variables["RAGCACHE_SOURCE_2_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "web",
        "key": "bearer",
        "optional": True,
    }
    hosts = variables["RAGCACHE_SOURCE_2_HOSTS"]["valueFrom"]["secretKeyRef"]
    assert (hosts["name"], hosts["key"]) == ("web", "ragcache-hosts")
    reference = variables["RAGCACHE_SOURCE_3_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "git", "key": "token", "optional": True}


def test_a_sync_gets_the_key_of_its_collection_from_a_secret_of_its_own() -> None:
    target = replace(target_of(collection(), make_cache()), key="rck-sync.faq.x")
    made = key_secret(target)
    kubernetes_validate.validate(made, "1.37", strict=True)
    assert made["stringData"] == {"key": "rck-sync.faq.x"}
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("RagCollection", "uid-1")
    [reference] = [
        one["valueFrom"]["secretKeyRef"]
        for one in container(removal_job(target))["env"]
        if one["name"] == "RAGCACHE_API_KEY"
    ]
    assert reference == {"name": made["metadata"]["name"], "key": "key"}
    names = {key_secret(replace(target, key=key))["metadata"]["name"] for key in ("a", "b")}
    assert len(names) == 2


@pytest.mark.parametrize("make", [job, removal])
def test_a_job_reads_the_certificate_of_an_https_gateway_and_not_its_key(
    make: Callable[..., Object],
) -> None:
    assert "--certificate" not in container(make())["args"]
    made = make(gateway={"tls": {"secretName": "own"}})
    arguments = container(made)["args"]
    path = Path(arguments[arguments.index("--certificate") + 1])
    mounts = {one["mountPath"]: one["name"] for one in container(made)["volumeMounts"]}
    volumes = {one["name"]: one for one in made["spec"]["template"]["spec"]["volumes"]}
    volume = volumes[mounts[str(path.parent)]]["secret"]
    assert volume["secretName"] == "own"
    assert volume["items"] == [{"key": "tls.crt", "path": path.name}]


def test_only_networks_of_the_operator_are_allowed() -> None:
    target = replace(target_of(collection(), make_cache()), allowed_networks=("10.1.0.0/16",))
    made = sync_job(target, Revision("a", "b"), 0, "", 1.0, ())
    assert "--allow-network=10.1.0.0/16" in container(made)["args"]
    assert not any("--allow" in argument for argument in container(job())["args"])


def test_pods_follow_the_template_of_the_cache() -> None:
    template = {"nodeSelector": {"pool": "rag"}, "imagePullSecrets": [{"name": "registry"}]}
    pod = job(podTemplate=template)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "rag"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_pods_have_the_environment_and_authorities_of_the_cache() -> None:
    made = job(
        env=[{"name": "GIT_TRACE", "value": "1"}],
        trustedCA={"configMap": "authorities"},
        proxy={"https": "http://proxy.example.com:3128"},
    )
    variables = {v["name"]: v.get("value") for v in container(made)["env"]}
    assert variables["GIT_TRACE"] == "1"
    assert variables["https_proxy"] == "http://proxy.example.com:3128"
    assert ".svc" in str(variables["no_proxy"]).split(",")
    assert variables["GIT_SSL_CAINFO"] == "/etc/ragcache/trusted-ca/ca.crt"
    mounts = {m["name"]: m for m in container(made)["volumeMounts"]}
    assert mounts["trusted-ca"]["mountPath"] == "/etc/ragcache/trusted-ca"
    volumes = {v["name"]: v for v in made["spec"]["template"]["spec"]["volumes"]}
    assert volumes["trusted-ca"]["configMap"]["name"] == "authorities"
    kubernetes_validate.validate(made, "1.37", strict=True)


def test_the_template_of_jobs_overrides_that_of_all_pods() -> None:
    made = job(
        podTemplate={"labels": {"team": "a"}, "nodeSelector": {"pool": "rag"}},
        syncJobs={"podTemplate": {"labels": {"of": "jobs"}, "nodeSelector": {}}},
    )
    template = made["spec"]["template"]
    assert {"team": "a", "of": "jobs"}.items() <= template["metadata"]["labels"].items()
    assert "nodeSelector" not in template["spec"]


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({}, {"cpu": "100m", "memory": "256Mi"}, {"memory": "1Gi"}),
        (
            {"cpuLimit": "500m"},
            {"cpu": "100m", "memory": "256Mi"},
            {"cpu": "500m", "memory": "1Gi"},
        ),
        ({"cpuLimit": "50m"}, {"cpu": "50m", "memory": "256Mi"}, {"cpu": "50m", "memory": "1Gi"}),
        ({"memory": "2Gi"}, {"cpu": "100m", "memory": "2Gi"}, {"memory": "2Gi"}),
        ({"memoryLimit": "128Mi"}, {"cpu": "100m", "memory": "128Mi"}, {"memory": "128Mi"}),
    ],
)
def test_resources_of_jobs_follow_the_cache(
    given: Object, requests: Object, limits: Object
) -> None:
    found = container(job(syncJobs={"resources": given}))["resources"]
    assert found == {"requests": requests, "limits": limits}


def test_every_sync_has_a_unique_and_repeatable_name() -> None:
    made = [job(), job(attempt=1), job(after="2026-01-01T00:00:00Z")]
    names = {one["metadata"]["name"] for one in made}
    assert len(names) == 3
    assert job() == made[0]
    longest = collection(EVERY_KIND[0]).model_copy(
        update={"metadata": collection().metadata.model_copy(update={"name": "x" * 40})}
    )
    assert len(job(longest)["metadata"]["name"]) <= 63


def test_a_sync_job_has_an_owner_and_a_removal_job_has_none() -> None:
    [owner] = job()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RagCollection", "faq", "uid-1")
    assert "ownerReferences" not in removal()["metadata"]
    assert is_removal(removal())
    assert not is_removal(job())


def test_jobs_and_pods_are_found_by_their_labels() -> None:
    for made in (job(), removal()):
        for labels in (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"]):
            assert labels[COLLECTION_LABEL] == "faq"
            assert labels["app.kubernetes.io/instance"] == "docs"
            assert labels["app.kubernetes.io/component"] == "sync"


def test_a_job_is_read_back_with_its_revision_and_attempt() -> None:
    live = job(attempt=3)
    live["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    read = read_job(live)
    assert (read.revision, read.attempt) == (Revision("aaaa", "bbbb"), 3)
    assert read.started_at == 1_800_000_000.25
    assert read.may_run
    assert read.outcome is None
    said = Outcome("partial", "a: b", documents=3, failures=("a: b",), failure_count=1)
    live["metadata"]["annotations"][OUTCOME] = said.to_json()
    live["status"] = {
        "conditions": [
            {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}
        ]
    }
    read = read_job(live)
    assert (read.outcome, read.finished_at) == (said, parse_time("2026-01-01T00:01:00Z"))
    assert not read.may_run
    live["metadata"]["annotations"][OUTCOME] = "{}"
    assert read_job(live).outcome == Outcome("failed", "the outcome annotation is invalid")


@given(at=st.integers(0, 2**32))
def test_times_survive_formatting(at: int) -> None:
    assert parse_time(format_time(at)) == at


def pod(exit_code: int, message: str, reason: str = "Error") -> Object:
    ended = {"exitCode": exit_code, "message": message, "reason": reason}
    return {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {"containerStatuses": [{"state": {"terminated": ended}}]},
    }


def result(**fields: Any) -> str:
    whole = {"documents": 2, "chunks": 4, "written": 1, "unchanged": 1, "deleted": 0, "skipped": 0}
    rest = {"finished": True, "revision": "1234", "failures": [], "failureCount": 0}
    warned = {"warnings": [], "warningCount": 0}
    return json.dumps({**whole, **rest, **warned, **fields})


FAILURE = {"source": "configMap faq", "document": "a.md", "problem": "is empty"}


def test_the_outcome_is_read_from_the_result() -> None:
    well = outcome_of({}, [pod(0, result())])
    assert (well.verdict, well.documents, well.chunks, well.revision) == ("complete", 2, 4, "1234")
    partly = outcome_of({}, [pod(1, result(failures=[FAILURE], failureCount=7))])
    assert (partly.verdict, partly.failure_count) == ("partial", 7)
    assert partly.failures == ("configMap faq: a.md: is empty",)
    warning = {**FAILURE, "document": "b.pdf", "problem": "page 2 was not read"}
    warned = outcome_of({}, [pod(0, result(warnings=[warning], warningCount=3))])
    assert (warned.verdict, warned.warning_count) == ("complete", 3)
    assert warned.warnings == ("configMap faq: b.pdf: page 2 was not read",)
    assert outcome_of({}, [pod(0, result(skipped=4))]).skipped == 4
    assert Outcome.from_json(warned.to_json()) == warned
    lost = {**FAILURE, "source": "", "document": ""}
    unfinished = result(finished=False, failures=[lost], failureCount=1)
    assert outcome_of({}, [pod(1, unfinished)]).verdict == "failed"
    mistake = outcome_of({}, [pod(2, unfinished)])
    assert (mistake.verdict, mistake.message) == ("refused", "is empty")


def test_a_killed_command_leaves_its_last_line() -> None:
    # Without a result file the message is the end of the log.
    died = outcome_of({}, [pod(137, '{"done": 1, "total": 2}\nKilled', "OOMKilled")])
    assert (died.verdict, died.message) == ("failed", "OOMKilled: Killed")
    assert outcome_of({}, [pod(1, "")]).message == "Error: exit code 1"


def test_a_job_without_a_pod_reports_its_own_condition() -> None:
    failed = {"type": "Failed", "status": "True", "message": "it was active longer than 14400 s"}
    outcome = outcome_of({"status": {"conditions": [failed]}}, [])
    assert (outcome.verdict, outcome.message) == ("failed", "it was active longer than 14400 s")
    assert outcome_of({}, []).message == "the pod no longer exists"


@given(message=st.one_of(st.text(), st.recursive(st.none(), st.lists).map(json.dumps)))
def test_any_message_gives_an_outcome(message: str) -> None:
    assert outcome_of({}, [pod(1, message)]).verdict == "failed"


def test_the_reason_of_a_waiting_pod_is_reported() -> None:
    assert waiting_reason([]) == ""
    assert waiting_reason([pod(0, "")]) == ""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    unscheduled = {
        "metadata": {"creationTimestamp": "2026-01-02T00:00:00Z"},
        "status": {"conditions": [{**scheduled, "message": "0/1 nodes are available"}]},
    }
    assert waiting_reason([pod(0, ""), unscheduled]) == "Unschedulable: 0/1 nodes are available"


def revision(given: RagCollection, maps: dict[str, Object | None], uid: str = "u") -> Revision:
    return revision_of(given, uid, maps)


def test_a_revision_changes_only_with_the_inputs_of_a_sync() -> None:
    faq: Object = {"metadata": {"resourceVersion": "1"}, "data": {"a.md": "A"}}
    given = collection()
    first = revision(given, {"faq": faq})
    assert Revision.parse(str(first)) == first
    assert revision(given, {"faq": {**faq, "metadata": {"resourceVersion": "2"}}}) == first
    assert revision(collection(sync={"interval": "1h"}), {"faq": faq}) == first
    contents = revision(given, {"faq": {**faq, "data": {"a.md": "B"}}})
    assert (contents.spec, contents.contents != first.contents) == (first.spec, True)
    for changed in (
        revision(collection(prune=False), {"faq": faq}),
        revision(collection(EVERY_KIND[0]), {"faq": faq}),
        revision(given, {"faq": faq}, uid="another RagCache"),
    ):
        assert changed.spec != first.spec
    assert revision(given, {"faq": None}).contents != first.contents


def test_the_example_gives_a_valid_job() -> None:
    documents = list(yaml.safe_load_all(Path("examples/collection.yaml").read_text()))
    given = parse_collection(documents[1])
    assert given.spec.sources[0].config_map is not None
    assert given.spec.sources[0].config_map.name == documents[0]["metadata"]["name"]
