"""A RagCache in the test cluster, as its users see it: kubectl, the gateway's Service, answers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from harness import packages
from harness.availability import Unavailable, skip
from harness.cluster.timeline import step
from harness.tiny_model import TINYRAG
from models.tinyrag.handbook import Handbook, Question, make_handbook, sample_questions
from ragcache_core.errors import InvalidInput
from tests.cluster.cluster import Cluster
from tools.images import IMAGES, make_images

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "docs"
SYSTEM = "ragcache-system"
NAME = "quickstart"
COLLECTION = "handbook"
DOCUMENTS = 24
_SEED = 20
_COMPONENT = "app.kubernetes.io/component"


def bring_images(cluster: Cluster, source: Path = ROOT) -> None:
    """Build a checkout's images and bring them; skips where that cannot be done."""
    with step(f"images of {source.name} brought"):
        try:
            packages.require(packages.IMAGES)
            made = sorted(make_images(IMAGES, source=source), key=lambda image: image.size)
            # The largest takes as long as all others, of which the last has most in common with it.
            with ThreadPoolExecutor(2) as pool:
                loads = [
                    pool.submit(image.load, cluster.image_import) for image in made[-1:] + made[:-1]
                ]
            for load in loads:
                load.result()
        except Unavailable as reason:
            skip(reason)
        except InvalidInput as reason:
            skip(Unavailable(str(reason)))


def make_namespace(cluster: Cluster) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})


def handbook() -> Handbook:
    """What the platform is told and asked about."""
    return make_handbook(_SEED, DOCUMENTS, "held_out")


def quickstart(**changes: Any) -> dict[str, Any]:
    """The example's object in the tests' namespace, with the model that knows the tests' answers.

    changes: to fields of its spec, one level.
    """
    cache: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    cache["metadata"]["namespace"] = NAMESPACE
    cache["spec"] |= TINYRAG
    for field, values in changes.items():
        given = cache["spec"].get(field)
        cache["spec"][field] = {**given, **values} if isinstance(given, dict) else values
    return cache


def collection_of_config_map(book: Handbook) -> list[dict[str, Any]]:
    """A RagCollection, and the ConfigMap that its documents come from."""
    pages = {f"{document.id}.md": document.text + "\n" for document in book.documents}
    meta = {"name": COLLECTION, "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": pages},
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCollection",
            "metadata": meta,
            "spec": {
                "cacheRef": {"name": NAME},
                "sync": {"interval": "1h"},
                "labels": False,  # the model's training had none
                "sources": [{"configMap": {"name": COLLECTION}}],
            },
        },
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question brought."""

    text: str
    documents: frozenset[str]
    """Ids of the documents cited, without their suffix."""

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Answer:
        cited = {c["document_id"].removesuffix(".md") for c in reply["ragcache"]["citations"]}
        return cls(reply["choices"][0]["message"]["content"].strip(), frozenset(cited))

    def is_right(self, question: Question) -> bool:
        """Whether it says the fact and cites what says so."""
        return self.text == question.answer and self.documents.issuperset(question.supports)


@dataclass(frozen=True, slots=True)
class Platform:
    """One RagCache of a cluster."""

    cluster: Cluster

    def ragcache(self, *words: str) -> str:
        """What a command of the cli prints; raises CalledProcessError with its words."""
        argv = [sys.executable, "-m", "ragcache_cli", *words, "--kubeconfig", str(self.kubeconfig)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def install(self) -> None:
        """Install the operator, and wait until it is ready."""
        values = self.kubeconfig.with_name("values.yaml")
        values.write_text(yaml.safe_dump(self.cluster.operator_values))
        self.ragcache("install", "--wait", "--values", str(values))

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    @property
    def url(self) -> str:
        """Base URL of the port for questions."""
        return self.cluster.service_url(NAMESPACE, f"{NAME}-gateway", "http")

    def admin_client(self) -> httpx.Client:
        """Return a client of the port that serves every path, with the generated key."""
        url = self.cluster.service_url(NAMESPACE, f"{NAME}-gateway", "admin")
        return httpx.Client(base_url=url, headers=self._headers(), timeout=60, trust_env=False)

    def _headers(self) -> dict[str, str]:
        """Return the generated key as a header; nothing before the operator has made one."""
        secret = self.status().get("apiKeySecret")
        if secret is None:
            return {}
        data = self.cluster.get("secret", secret, NAMESPACE)["data"]
        return {"Authorization": f"Bearer {base64.b64decode(data['admin-key']).decode()}"}

    def ask(self, question: str, **extension: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": question}],
            "ragcache": {"collection": COLLECTION, "top_k": 6, **extension},
        }
        # A Service leads to a pod that is gone until the node's proxy has heard of it.
        connecting_again = httpx.HTTPTransport(retries=4)
        with httpx.Client(transport=connecting_again, timeout=120) as client:
            return client.post(
                f"{self.url}/v1/chat/completions", json=body, headers=self._headers()
            )

    def answer(self, question: str) -> Answer:
        reply = self.ask(question)
        assert reply.status_code == 200, reply.text
        return Answer.of(reply.json())

    def status(self, kind: str = "ragcache", name: str = NAME) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.get(kind, name, NAMESPACE).get("status", {})
        return status

    def condition(self, name: str, kind: str = "ragcache", of: str = NAME) -> dict[str, Any]:
        conditions = self.status(kind, of).get("conditions", [])
        return next((c for c in conditions if c["type"] == name), {})

    def is_settled(self) -> bool:
        """Ready for the spec as it is now."""
        cache = self.cluster.get("ragcache", NAME, NAMESPACE)
        status = cache.get("status", {})
        current: bool = status.get("observedGeneration") == cache["metadata"]["generation"]
        return current and status.get("phase") == "Ready"

    def wait_settled(self, what: str, limit_s: float = 300) -> None:
        try:
            self.cluster.wait_until(self.is_settled, what, limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; status: {json.dumps(self.status())}") from error

    def running_pods(self, component: str) -> list[dict[str, Any]]:
        """A component's pods that are not on their way out."""
        labels = f"app.kubernetes.io/instance={NAME},{_COMPONENT}={component}"
        pods = self.cluster.get_all("pods", NAMESPACE, labels)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def pods(self, component: str) -> dict[str, str]:
        """Names and uids of a component's pods that are not on their way out."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.running_pods(component)
        }

    def is_replaced(self, component: str, before: dict[str, str]) -> bool:
        """Whether as many pods of a component as before are ready, and one of them is new."""
        ready = {pod["metadata"]["uid"] for pod in self.running_pods(component) if _is_ready(pod)}
        return len(ready) == len(before) and ready != set(before.values())

    def patch(self, spec: dict[str, Any], name: str = NAME, kind: str = "ragcache") -> None:
        self.cluster.kubectl(
            *("patch", kind, name, f"--namespace={NAMESPACE}", "--type=merge"),
            f"--patch={json.dumps({'spec': spec})}",
        )

    def events(self, reason: str) -> list[dict[str, Any]]:
        found = self.cluster.get_all("events", NAMESPACE)
        return [event for event in found if event["reason"] == reason]


def single_questions(book: Handbook, number: int) -> list[Question]:
    """Questions for one fact each."""
    drawn = sample_questions(book, 12 * number, "held_out")
    return [question for question in drawn if question.kind == "single"][:number]


def namespace_contents(cluster: Cluster) -> frozenset[str]:
    """Return every object of the tests' namespace, of all kinds that can be listed except Events.

    A test for leftovers must trust neither labels nor owners.
    """
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name")
    told = ",".join(kind for kind in kinds.split() if not kind.startswith("events"))
    said = cluster.kubectl("get", told, f"--namespace={NAMESPACE}", "--output=name")
    return frozenset(said.split())


def is_furnished(contents: frozenset[str]) -> bool:
    """Whether a namespace has all that Kubernetes itself puts into every one."""
    own = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
    return own <= contents and any(name.startswith("secret/default-token") for name in contents)


def _is_ready(pod: dict[str, Any]) -> bool:
    said = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in said)
