"""Reviews and configurations of the webhooks, without a server."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

import kopf
import pytest

from ragcache_operator.kube.resources import Object
from ragcache_operator.webhooks import admission
from ragcache_operator.webhooks.admission import (
    DEFAULT,
    VALIDATE,
    AdmissionConfig,
    rejection,
    spec_with_defaults,
    webhooks,
)
from ragcache_operator.webhooks.webhook_server import service_client_config, url_client_config


def cache(**spec: Any) -> Object:
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCache",
        "metadata": {"name": "demo", "namespace": "team"},
        "spec": spec,
    }


def collection(**spec: Any) -> Object:
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCollection",
        "metadata": {"name": "handbook", "namespace": "team"},
        "spec": {"cacheRef": {"name": "demo"}, "sources": [{"configMap": {"name": "a"}}], **spec},
    }


BAD = {"model": {"maxLength": 1}, "gateway": {"replicas": 0}}


def test_a_rejection_has_one_line_with_path_and_fix_for_each_problem() -> None:
    said = rejection(cache(**BAD), None)
    assert said is not None
    assert said.splitlines() == [
        "spec.model.maxLength: 1 is too small; use at least 64",
        "spec.gateway.replicas: 0 is too small; use at least 1",
    ]


def test_a_valid_object_passes() -> None:
    assert rejection(cache(), None) is None
    assert rejection(collection(), None) is None


def test_an_update_that_keeps_a_bad_spec_passes() -> None:
    old = cache(**BAD)
    new = copy.deepcopy(old)
    new["metadata"]["finalizers"] = []
    assert rejection(new, old) is None
    assert rejection(cache(**BAD, dataPolicy="Delete"), old) is not None


def test_an_object_being_deleted_passes() -> None:
    leaving = cache(**BAD)
    leaving["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert rejection(leaving, cache()) is None


def test_a_null_means_not_given() -> None:
    assert spec_with_defaults(
        cache(model={"name": None, "source": "bundled:tinyrag"}, engines=None)
    ) == {"model": {"source": "bundled:tinyrag"}}
    assert spec_with_defaults(cache(engines=[{"name": "main", "resources": None}])) == {
        "engines": [{"name": "main"}]
    }


def test_a_collection_is_named_after_its_object_by_default() -> None:
    assert spec_with_defaults(collection())["collection"] == "handbook"
    assert spec_with_defaults(collection(collection=None))["collection"] == "handbook"
    assert spec_with_defaults(collection(collection="other"))["collection"] == "other"


def test_an_object_with_a_generated_name_gets_no_default() -> None:
    unnamed = collection()
    unnamed["metadata"] = {"generateName": "handbook-"}
    assert "collection" not in spec_with_defaults(unnamed)


@pytest.mark.parametrize("spec", [None, [], "text", 1])
def test_a_spec_that_is_not_a_mapping_stays_unchanged(spec: Any) -> None:
    assert spec_with_defaults({**collection(), "spec": spec}) == spec


def test_a_model_gets_no_default_name() -> None:
    assert spec_with_defaults(cache(model={"source": "bundled:tinyrag"})) == {
        "model": {"source": "bundled:tinyrag"}
    }


@pytest.mark.parametrize("webhook", [VALIDATE, DEFAULT])
def test_a_webhook_that_is_down_blocks_no_user(webhook: str) -> None:
    (said,) = webhooks(webhook, service_client_config("hooks", "ragcache-system")("Q0E="), ())
    assert said["failurePolicy"] == "Ignore"
    assert said["timeoutSeconds"] <= 5
    assert said["sideEffects"] == "None"


def test_each_webhook_has_its_own_path() -> None:
    (said,) = webhooks(VALIDATE, service_client_config("hooks", "ragcache-system")("Q0E="), ())
    assert said["clientConfig"] == {
        "service": {
            "name": "hooks",
            "namespace": "ragcache-system",
            "port": 443,
            "path": "/validate",
        },
        "caBundle": "Q0E=",
    }
    (said,) = webhooks(DEFAULT, url_client_config("https://127.0.0.1:9443")("Q0E="), ())
    assert said["clientConfig"] == {"url": "https://127.0.0.1:9443/default", "caBundle": "Q0E="}


def test_subresources_are_not_reviewed() -> None:
    (said,) = webhooks(VALIDATE, service_client_config("hooks", "ns")(""), ())
    (rule,) = said["rules"]
    assert rule["resources"] == ["ragcaches", "ragcollections"]
    assert rule["operations"] == ["CREATE", "UPDATE"]


def test_an_operator_of_some_namespaces_reviews_only_those() -> None:
    (said,) = webhooks(VALIDATE, service_client_config("hooks", "ns")(""), ("team-a", "team-b"))
    assert said["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
    ]


def test_the_chart_and_the_operator_agree_on_names() -> None:
    config = AdmissionConfig.behind_service("hooks", "ragcache-system", (), 9443)
    assert config.secret == "hooks-tls"
    assert config.configurations == "hooks.ragcache-system"
    assert config.names[0] == "hooks.ragcache-system.svc"


def test_an_error_of_the_webhook_lets_objects_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(admission, "rejection", broken)
    monkeypatch.setattr(admission, "spec_with_defaults", broken)
    body, patch = kopf.Body(cast(Any, collection())), kopf.Patch()
    with caplog.at_level(logging.ERROR):
        admission.validate(body, old=None)
        admission.default(body, patch, old=None)
    assert not patch
    assert caplog.text.count("RuntimeError: a bug") == 2
