"""The chart on a real API server: install, upgrade, uninstall and permissions."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import helm_python
import pytest
import yaml

from harness import availability
from harness.cluster.control_plane import ControlPlane, start_control_plane
from harness.cluster.kubeconfig import User
from ragcache_cli.kubernetes import install as installing
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    LEASES,
    RAG_CACHES,
    SECRETS,
    SERVICES,
    Object,
    Resource,
)
from tests.kit.chart import CHART, NAMESPACE, RELEASE
from tests.kit.manifests import cache
from tests.kit.wait import until, wait_until

# The user of the operator's pods. RBAC checks the name, not how it was authenticated.
OPERATOR = User(f"system:serviceaccount:{NAMESPACE}:{RELEASE}")
VIEWER, EDITOR = User("viewer"), User("editor")

T = TypeVar("T")


class ChartCluster:
    """A control plane for installations and API calls."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.choice = ClusterChoice(kubeconfig=plane.kubeconfig)

    def install(self, values: Object | None = None, **options: Any) -> installing.Installed:
        """Install as `ragcache install` does, for all namespaces if the values name none."""
        given = {"watch": {"allNamespaces": True}} | (values or {})
        return installing.install(self.choice, given, **options)

    def uninstall(self) -> None:
        """Remove the release as `helm uninstall` does."""
        with helm_python.Config(
            kubeconfig_path=self.plane.kubeconfig, namespace=NAMESPACE
        ) as config:
            config.uninstall(RELEASE, ignore_not_found=True)

    def ask(self, question: Callable[[Api], Awaitable[T]], user: User | None = None) -> T:
        """Call the API as a user and return the answer."""
        kubeconfig = self._kubeconfig(user) if user else self.plane.kubeconfig

        async def asked() -> T:
            async with await Api.connect(kubeconfig) as api:
                return await question(api)

        return asyncio.run(asked())

    def _kubeconfig(self, user: User) -> Path:
        # The name of a service account has colons, which separate kubeconfigs in a list.
        path = self.plane.folder / user.name.rpartition(":")[2]
        return Path(shutil.copy(self.plane.kubeconfig_for(user), path))

    def get(
        self, resource: Resource, name: str, namespace: str | None = NAMESPACE
    ) -> Object | None:
        """Return an object, or None."""
        return self.ask(lambda api: api.get(resource, name, namespace))

    def denies(self, user: User, call: Callable[[Api], Awaitable[Any]]) -> bool:
        """Whether the API server denies a call to a user."""
        try:
            self.ask(call, user)
        except ApiError as error:
            if error.status != 403:
                raise
            return True
        return False

    def wait_for_kinds(self) -> None:
        """Wait until the kinds are served, shortly after their definitions exist."""

        def are_served() -> bool:
            try:
                self.ask(lambda api: api.list(RAG_CACHES, "default"))
            except ApiError:
                return False
            return True

        wait_until(are_served, "the kinds")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartCluster]:
    folder = tmp_path_factory.mktemp("plane")
    users = (OPERATOR, VIEWER, EDITOR)
    try:
        starting = start_control_plane(folder, controllers=True, users=users)
        plane = starting.__enter__()
    except availability.Unavailable as reason:
        availability.skip(reason)
    try:
        yield ChartCluster(plane)
    finally:
        starting.__exit__(None, None, None)


@pytest.fixture
def cluster(plane: ChartCluster) -> Iterator[ChartCluster]:
    """A cluster without a release before and after the test. The kinds may exist."""
    plane.uninstall()
    yield plane
    plane.uninstall()


RAG_CACHE = {"model": {"source": "bundled:tinyrag"}}


def config_map(namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "docs-members", "namespace": namespace},
        "data": {"a": "b"},
    }


def objects_of(installed: installing.Installed) -> list[Object]:
    return [obj for obj in yaml.safe_load_all(installed.manifest) if obj]


def test_install_upgrade_and_uninstall_keep_the_kinds(cluster: ChartCluster) -> None:
    first = cluster.install()
    assert (first.was_there, first.revision) == (False, 1)
    assert "serves all namespaces" in first.notes
    assert cluster.get(DEPLOYMENTS, RELEASE) is not None
    assert cluster.get(DISRUPTION_BUDGETS, RELEASE) is not None
    cluster.wait_for_kinds()
    cluster.ask(lambda api: api.create(RAG_CACHES, cache("docs", "default", **RAG_CACHE)))

    team = {"namespaces": ["team"], "allNamespaces": False}
    second = cluster.install({"replicas": 1, "watch": team}, dry_run=True)
    assert (second.was_there, second.revision) == (True, 2)
    deployment = cluster.get(DEPLOYMENTS, RELEASE)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2

    cluster.install({"replicas": 1})
    kept = cluster.install({"logLevel": "debug"})
    deployment = cluster.get(DEPLOYMENTS, RELEASE)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1
    cluster.install(reset_values=True)
    deployment = cluster.get(DEPLOYMENTS, RELEASE)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2

    cluster.uninstall()
    kinds = {obj["metadata"]["name"] for obj in objects_of(kept) if obj["kind"] == CRDS.kind}
    assert kinds == {"ragcaches.ragcache.dev", "ragcollections.ragcache.dev"}
    assert _living(cluster, objects_of(kept)) == kinds
    assert cluster.get(RAG_CACHES, "docs", "default") is not None

    again = cluster.install()
    assert (again.was_there, again.revision) == (False, 1)
    assert cluster.get(RAG_CACHES, "docs", "default") is not None
    cluster.ask(lambda api: api.delete(RAG_CACHES, "docs", "default"))


def _living(cluster: ChartCluster, objects: list[Object]) -> set[str]:
    """Return the names of existing objects, after a wait for background deletions."""

    async def found(api: Api) -> set[str]:
        names = set()
        for obj in objects:
            meta = obj["metadata"]
            group, _, version = obj["apiVersion"].rpartition("/")
            plural = {"NetworkPolicy": "networkpolicies"}.get(
                obj["kind"], f"{obj['kind'].lower()}s"
            )
            resource = Resource(group, version, plural, obj["kind"], "namespace" in meta)
            if await api.get(resource, meta["name"], meta.get("namespace")):
                names.add(meta["name"])
        return names

    names: set[str] = set()

    def are_deleted() -> bool:
        nonlocal names
        names = cluster.ask(found)
        return all(name.endswith(".ragcache.dev") for name in names)

    wait_until(are_deleted)
    return names


def test_an_upgrade_updates_the_definitions(
    cluster: ChartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "chart"
    shutil.copytree(CHART, older)
    path = older / "files" / "crds" / "ragcaches.yaml"
    definition = yaml.safe_load(path.read_text())
    spec = _properties(definition)["spec"]["properties"]
    spec.pop("networkPolicy")
    spec["outdated"] = {"type": "string"}
    path.write_text(yaml.safe_dump(definition))
    with monkeypatch.context() as patched:
        patched.setattr(installing, "CHART", older)
        cluster.install()
    before = cluster.get(CRDS, "ragcaches.ragcache.dev", None)
    assert before is not None
    assert "outdated" in _properties(before)["spec"]["properties"]

    cluster.install()
    after = cluster.get(CRDS, "ragcaches.ragcache.dev", None)
    assert after is not None
    fields = _properties(after)["spec"]["properties"]
    assert "networkPolicy" in fields
    assert "outdated" not in fields


def _properties(definition: Object) -> Object:
    [version] = definition["spec"]["versions"]
    properties: Object = version["schema"]["openAPIV3Schema"]["properties"]
    return properties


def test_an_older_cluster_is_refused_with_the_version_that_is_needed(plane: ChartCluster) -> None:
    if not plane.plane.is_translated:
        pytest.skip("the server is new enough")
    older = ClusterChoice(kubeconfig=plane.plane.server_kubeconfig)
    with pytest.raises(InvalidInput, match=r"is Kubernetes v1\.20\.2, and RagCache needs 1\.29"):
        installing.install(older, {})


async def until_owners_are_known(api: Api, owned: Object) -> None:
    """The admission of owner references learns of a new kind some seconds after it is served."""

    async def are_known() -> bool:
        try:
            await api.apply(owned)
        except ApiError as error:
            if "RESTMapping" not in str(error):
                raise
            return False
        return True

    await until(are_known)


def test_the_operator_has_the_permissions_it_needs_and_no_others(cluster: ChartCluster) -> None:
    cluster.install()
    cluster.wait_for_kinds()
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "docs-gateway", "namespace": "default"},
        "spec": {"ports": [{"port": 80, "protocol": "TCP"}]},
    }
    key: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "docs-signing-key", "namespace": "default"},
        "stringData": {"keys": "ab"},
    }
    lease: Object = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": RELEASE, "namespace": NAMESPACE},
        "spec": {"holderIdentity": "a"},
    }
    cluster.ask(lambda api: api.create(RAG_CACHES, cache("docs", "default", **RAG_CACHE)))

    async def work(api: Api) -> None:
        cache = await api.get(RAG_CACHES, "docs", "default")
        assert cache is not None
        owner = {
            "apiVersion": cache["apiVersion"],
            "kind": cache["kind"],
            "name": "docs",
            "uid": cache["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        owned = {**config_map("default")}
        owned["metadata"] = {**owned["metadata"], "ownerReferences": [owner]}
        await until_owners_are_known(api, owned)
        for _ in range(2):
            await api.apply(owned)
            await api.apply(service)
        finalizer = {"metadata": {"finalizers": ["ragcache.dev/finalizer"]}}
        await api.merge(RAG_CACHES, "docs", "default", finalizer)
        phase = {"status": {"phase": "Pending", "observedGeneration": 1}}
        await api.merge(RAG_CACHES, "docs", "default", phase, "status")
        await api.merge(RAG_CACHES, "docs", "default", {"metadata": {"finalizers": None}})
        held = await api.create(LEASES, lease)
        await api.replace(LEASES, held)
        assert await api.delete(SERVICES, "docs-gateway", "default")
        assert await api.delete(CONFIG_MAPS, "docs-members", "default")
        await api.create(
            SECRETS, {**key, "metadata": {**key["metadata"], "ownerReferences": [owner]}}
        )

    cluster.ask(work, OPERATOR)
    foreign_lease = {**lease, "metadata": {"name": "other", "namespace": NAMESPACE}}
    cluster.ask(lambda api: api.create(LEASES, foreign_lease))
    for call in (
        lambda api: api.list(SECRETS),
        lambda api: api.list(SECRETS, NAMESPACE),
        lambda api: api.get(SECRETS, "any", "default"),
        lambda api: api.get(SECRETS, "any", NAMESPACE),
        # Not even a Secret that it has created.
        lambda api: api.get(SECRETS, "docs-signing-key", "default"),
        lambda api: api.apply(key),
        lambda api: api.delete(SECRETS, "docs-signing-key", "default"),
        lambda api: api.delete(RAG_CACHES, "docs", "default"),
        # It may get and update Leases, because it grants that to retrievers.
        lambda api: api.list(LEASES),
        lambda api: api.delete(LEASES, "other", NAMESPACE),
        lambda api: api.list(CRDS),
        lambda api: api.read("/api/v1/nodes"),
    ):
        assert cluster.denies(OPERATOR, call)
    cluster.ask(lambda api: api.delete(RAG_CACHES, "docs", "default"))


def test_with_given_namespaces_it_has_permissions_only_there(cluster: ChartCluster) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}
    cluster.ask(lambda api: api.apply(namespace))
    cluster.install({"watch": {"namespaces": ["team"]}})
    cluster.wait_for_kinds()
    cluster.ask(lambda api: api.apply(config_map("team")), OPERATOR)
    cluster.ask(lambda api: api.list(RAG_CACHES, "team"), OPERATOR)
    assert cluster.denies(OPERATOR, lambda api: api.apply(config_map("default")))
    assert cluster.denies(OPERATOR, lambda api: api.list(RAG_CACHES, "default"))
    assert cluster.denies(OPERATOR, lambda api: api.list(RAG_CACHES))


def test_the_default_cluster_roles_include_the_kinds(cluster: ChartCluster) -> None:
    cluster.install()
    cluster.wait_for_kinds()
    bindings = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")

    async def bind(api: Api) -> None:
        for user, role in ((VIEWER, "view"), (EDITOR, "edit")):
            binding = {
                "apiVersion": bindings.api_version,
                "kind": bindings.kind,
                "metadata": {"name": user.name, "namespace": "default"},
                "roleRef": {
                    "apiGroup": bindings.group,
                    "kind": "ClusterRole",
                    "name": role,
                },
                "subjects": [{"kind": "User", "name": user.name}],
            }
            if await api.get(bindings, user.name, "default") is None:
                await api.create(bindings, binding)

    cluster.ask(bind)
    # The controller aggregates these roles after a short delay.
    wait_until(lambda: not cluster.denies(VIEWER, lambda api: api.list(RAG_CACHES, "default")))
    assert cluster.denies(
        VIEWER, lambda api: api.create(RAG_CACHES, cache("theirs", "default", **RAG_CACHE))
    )
    assert not cluster.denies(
        EDITOR, lambda api: api.create(RAG_CACHES, cache("theirs", "default", **RAG_CACHE))
    )
    scale = {"spec": {"replicas": 2}}
    assert not cluster.denies(
        EDITOR, lambda api: api.merge(RAG_CACHES, "theirs", "default", scale, "scale")
    )
    assert cluster.denies(
        EDITOR,
        lambda api: api.merge(RAG_CACHES, "theirs", "default", {"status": {}}, "status"),
    )
    assert not cluster.denies(EDITOR, lambda api: api.delete(RAG_CACHES, "theirs", "default"))


def test_failures_are_reported_in_one_line(cluster: ChartCluster) -> None:
    with pytest.raises(InvalidInput, match=r"^replicas: minimum: got 0, want 1; see .*README\.md"):
        cluster.install({"replicas": 0})
    with pytest.raises(InvalidInput, match=r"^--set/--values: extraEnv: RAGCACHE_LEASE is set by"):
        cluster.install({"extraEnv": [{"name": "RAGCACHE_LEASE", "value": "x"}]})
    with pytest.raises(Unavailable, match=r"not ready after 2 s: .*Deployment"):
        cluster.install(wait_s=2)
    # A failed installation can be upgraded.
    assert cluster.install().was_there


def test_an_unreachable_cluster_is_reported(tmp_path: Path) -> None:
    missing = ClusterChoice(kubeconfig=tmp_path / "none")
    with pytest.raises(InvalidInput, match=r"^--kubeconfig: there is no .*/none; name a file"):
        installing.install(missing, {})
