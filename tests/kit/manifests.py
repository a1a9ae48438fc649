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


_LABEL = "use lower-case letters, digits and '-', with a letter or digit at both ends"
_OBJECT_NAME = "use lower-case letters, digits, '-' and '.', with a letter or digit at both ends"
_BYTES = "write bytes as a Kubernetes quantity, like 512Mi or 2Gi"
_URL = "write it like https://example.com/handbook.zip"
_PATH = "write it like docs/handbook, without '..' and without a leading '/'"
_EMPTY_TEXT = "set a value, or leave the field out"
_EMPTY_LIST = "add an item, or leave the field out"
_LEAVE_OR_MOVE = "leave it out, or move it to unsafeArgs if you trust what it loads"
_UNSAFE = "write the flag's full name and its value as one item, like --model-impl=transformers"
_WITH_URL = (
    "is set together with url, and RagCache does not run this engine",
    "leave it out, or leave out url",
)
_S, _C, _W, _P = RejectedBy.SCHEMA, RejectedBy.CEL, RejectedBy.OPERATOR, RejectedBy.PARSER


def external(**more: Any) -> Object:
    """Manifest with an engine that RagCache does not run."""
    return cache(engines=[{"url": "http://vllm.models.svc:8000", **more}])


_CACHES = (
    Bad(
        *("name too long", _S, cache("d" * 41)),
        *("metadata.name", "is longer than 40 characters", "shorten it"),
    ),
    Bad(
        *("name with a dot", _S, cache("a.b")),
        *("metadata.name", "'a.b' is not a valid DNS label", _LABEL),
    ),
    Bad(
        *("section that is a list", _S, cache(gateway=[])),
        *("spec.gateway", "[] is not a mapping", "write a mapping"),
    ),
    Bad(
        *("port below its range", _S, cache(gateway={"port": 0})),
        *("spec.gateway.port", "0 is too small", "use at least 1"),
    ),
    Bad(
        *("port above its range", _S, cache(gateway={"port": 65536})),
        *("spec.gateway.port", "65536 is too large", "use at most 65535"),
    ),
    Bad(
        *("port in quotes", _S, cache(gateway={"port": "80"})),
        "spec.gateway.port",
        *("'80' is not an integer", "write an integer, without quotes"),
    ),
    Bad(
        *("no gateway", _S, cache(gateway={"replicas": 0})),
        *("spec.gateway.replicas", "0 is too small", "use at least 1"),
    ),
    Bad(
        *("too many gateways", _S, cache(gateway={"replicas": 65})),
        *("spec.gateway.replicas", "65 is too large", "use at most 64"),
    ),
    Bad(
        *("autoscaling without a bound", _S, cache(gateway={"autoscaling": {}})),
        *("spec.gateway.autoscaling.maxReplicas", "is missing", "add it"),
    ),
    Bad(
        "CPU target of zero",
        _S,
        cache(gateway={"autoscaling": {"maxReplicas": 2, "cpuPercent": 0}}),
        *("spec.gateway.autoscaling.cpuPercent", "0 is too small", "use at least 1"),
    ),
    Bad(
        "gateway's maxReplicas below replicas",
        _C,
        cache(gateway={"replicas": 3, "autoscaling": {"maxReplicas": 2}}),
        "spec.gateway.autoscaling.maxReplicas",
        "is below replicas",
        "use at least the value of replicas, or lower replicas",
    ),
    Bad(
        *("Ingress for no host", _S, cache(gateway={"ingress": {}})),
        *("spec.gateway.ingress.host", "is missing", "add it"),
    ),
    Bad(
        *("Ingress for an invalid host", _S, cache(gateway={"ingress": {"host": "Rag Example"}})),
        "spec.gateway.ingress.host",
        *("'Rag Example' is not a valid host name", "write it like rag.example.com"),
    ),
    Bad(
        *("HTTPRoute to nowhere", _S, cache(gateway={"httpRoute": {}})),
        *("spec.gateway.httpRoute.gateway", "is missing", "add it"),
    ),
    Bad(
        "host name twice",
        _S,
        cache(gateway={"httpRoute": {"gateway": "g", "hostnames": ["a.example", "a.example"]}}),
        "spec.gateway.httpRoute.hostnames[1]",
        *("'a.example' is used twice", "use a different name"),
    ),
    Bad(
        "one port for both",
        _C,
        cache(gateway={"port": 8090}),
        "spec.gateway.adminPort",
        *("is the gateway's port, too", "use another port"),
    ),
    Bad(
        "keys without auth",
        _C,
        cache(gateway={"auth": {"enabled": False, "secretRef": {"name": "keys"}}}),
        "spec.gateway.auth.secretRef",
        *("is set, but enabled is false", "leave it out, or set enabled to true"),
    ),
    Bad(
        "Ingress and HTTPRoute",
        _C,
        cache(gateway={"ingress": {"host": "a.example"}, "httpRoute": {"gateway": "g"}}),
        "spec.gateway.httpRoute",
        *("is set together with ingress", "keep the one that your cluster supports"),
    ),
    Bad(
        *("model without a kind", _S, cache(model={"source": "llama"})),
        *("spec.model.source", "'llama' names no model"),
        "use bundled:smollm2, hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER, image:REFERENCE "
        "or path:FOLDER",
    ),
    Bad(
        *("model that is not bundled", _S, cache(model={"source": "bundled:gpt"})),
        "spec.model.source",
        *("no bundled model is named 'gpt'", "use one of bundled:smollm2, bundled:tinyrag"),
    ),
    Bad(
        *("hub name with a space", _S, cache(model={"source": "hf:a b"})),
        *("spec.model.source", "'a b' is not a Hugging Face model name"),
        "write it like hf:meta-llama/Llama-3.1-8B-Instruct",
    ),
    Bad(
        *("folder outside its volume", _S, cache(model={"source": "pvc:models/../secrets"})),
        *("spec.model.source", "'models/../secrets' is not CLAIM or CLAIM/FOLDER"),
        "write it like pvc:models/llama-8b, without '..'",
    ),
    Bad(
        *("image without a name", _S, cache(model={"source": "image:"})),
        *("spec.model.source", "'' is not an image reference"),
        "write it like image:registry.example.com/models/llama-8b:1",
    ),
    Bad(
        *("local folder", _C, cache(model={"source": "path:/models/llama"})),
        "spec.model.source",
        "is a local folder, which pods cannot read",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    ),
    Bad(
        *("length beyond the model's", _C, cache(model={"maxLength": 9000})),
        "spec.model.maxLength",
        "is above the context length of the bundled model",
        "use 8192 or less for smollm2, 4096 or less for tinyrag",
    ),
    Bad(
        *("length too small", _S, cache(model={"maxLength": 10})),
        *("spec.model.maxLength", "10 is too small", "use at least 64"),
    ),
    Bad(
        *("unknown number format", _S, cache(model={"dtype": "int8"})),
        *("spec.model.dtype", "'int8' is not allowed"),
        "use 'auto', 'bfloat16', 'float16' or 'float32'",
    ),
    Bad(
        *("empty model name", _S, cache(model={"name": ""})),
        *("spec.model.name", "is empty", _EMPTY_TEXT),
    ),
    Bad(
        *("token without a hub model", _C, cache(model={"tokenSecret": {"name": "hub"}})),
        *("spec.model.tokenSecret", "is set, but only an hf: source needs a token"),
        "leave it out, or set source to hf:ORGANISATION/NAME",
    ),
    Bad(
        "token without a Secret",
        _S,
        cache(model={"source": "hf:a/b", "tokenSecret": {"key": "token"}}),
        *("spec.model.tokenSecret.name", "is missing", "add it"),
    ),
    Bad(
        "token with an invalid key",
        _S,
        cache(model={"source": "hf:a/b", "tokenSecret": {"name": "hub", "key": "a b"}}),
        *("spec.model.tokenSecret.key", "'a b' is not a valid key of a Secret"),
        "use letters, digits, '-', '_' and '.'",
    ),
    Bad(
        *("embedder without a kind", _S, cache(retriever={"embedder": {"source": "ftp://x"}})),
        *("spec.retriever.embedder.source", "'ftp://x' is not a valid embedder"),
        "use bundled:all-minilm-l6-v2, hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER, path:FOLDER, or the "
        "base URL of an OpenAI-compatible endpoint, like http://embeddings:8080/v1",
    ),
    Bad(
        *("endpoint without a model", _C, cache(retriever={"embedder": {"source": "http://e/v1"}})),
        "spec.retriever.embedder.model",
        *("is missing: an endpoint serves many models", "name one of them"),
    ),
    Bad(
        *("model without an endpoint", _C, cache(retriever={"embedder": {"model": "x"}})),
        *("spec.retriever.embedder.model", "is set, but only an endpoint has more than one model"),
        "leave it out, or set source to the URL of an endpoint",
    ),
    Bad(
        *("key for no endpoint", _C, cache(retriever={"embedder": {"keySecret": {"name": "k"}}})),
        *("spec.retriever.embedder.keySecret", "is set, but only an endpoint takes a key"),
        "leave it out, or set source to the URL of an endpoint",
    ),
    Bad(
        *("chunks too small", _S, cache(retriever={"chunking": {"size": 8, "overlap": 0}})),
        *("spec.retriever.chunking.size", "8 is too small", "use at least 16"),
    ),
    Bad(
        *("overlap below zero", _S, cache(retriever={"chunking": {"overlap": -1}})),
        *("spec.retriever.chunking.overlap", "-1 is too small", "use at least 0"),
    ),
    Bad(
        *("window too wide", _S, cache(retriever={"chunking": {"window": 9}})),
        *("spec.retriever.chunking.window", "9 is too large", "use at most 8"),
    ),
    Bad(
        *("overlap of half", _C, cache(retriever={"chunking": {"size": 128, "overlap": 64}})),
        "spec.retriever.chunking.overlap",
        *("is not less than half of size", "use about an eighth of the size"),
    ),
    Bad(
        *("volume with an invalid size", _S, cache(retriever={"storage": {"size": "10GB"}})),
        *("spec.retriever.storage.size", "'10GB' is not a quantity", _BYTES),
    ),
    Bad(
        *(
            "storage class with an invalid name",
            _S,
            cache(retriever={"storage": {"className": "Fast_Disk"}}),
        ),
        *(
            "spec.retriever.storage.className",
            "'Fast_Disk' is not a valid object name",
            _OBJECT_NAME,
        ),
    ),
    Bad(
        *("too many retrievers", _S, cache(retriever={"replicas": 6})),
        *("spec.retriever.replicas", "6 is too large", "use at most 5"),
    ),
    Bad(
        *("index of an unknown kind", _S, cache(retriever={"index": {"kind": "lsh"}})),
        "spec.retriever.index.kind",
        *("'lsh' is not allowed", "use 'auto', 'flat', 'ivf' or 'hnsw'"),
    ),
    Bad(
        *("recall below its range", _S, cache(retriever={"index": {"recall": 0.4}})),
        *("spec.retriever.index.recall", "0.4 is too small", "use at least 0.5"),
    ),
    Bad(
        *("unknown reranker", _S, cache(retriever={"reranker": {"source": "bundled"}})),
        *("spec.retriever.reranker.source", "'bundled' is not a valid reranker"),
        "use none, cross-encoder, or the base URL of an endpoint with /rerank, "
        "like http://reranker:8000/v1",
    ),
    Bad(
        "reranker endpoint without a model",
        _C,
        cache(retriever={"reranker": {"source": "http://e/v1"}}),
        "spec.retriever.reranker.model",
        *("is missing: cross-encoder and a URL need a model", "name one"),
    ),
    Bad(
        *("model for no reranker", _C, cache(retriever={"reranker": {"model": "x"}})),
        "spec.retriever.reranker.model",
        "is set, but the source none has no model",
        "leave it out, or set source to cross-encoder or the URL of an endpoint",
    ),
    Bad(
        "precision that a backend does not have",
        _C,
        cache(
            retriever={
                "index": {"precision": "sq8"},
                "backend": {"milvus": {"urlSecret": {"name": "a"}}},
            }
        ),
        *("spec.retriever.index", "has a precision that postgres and milvus do not use"),
        "leave out precision, or use the embedded backend",
    ),
    Bad(
        "folder that is no form of a cross-encoder",
        _C,
        cache(retriever={"reranker": {"source": "cross-encoder", "model": "/models/ranker"}}),
        *("spec.retriever.reranker.model", "names no cross-encoder"),
        "use ORGANISATION/NAME of the hub, pvc:CLAIM/FOLDER or path:FOLDER",
    ),
    Bad(
        "key for no reranker endpoint",
        _C,
        cache(retriever={"reranker": {"source": "none", "keySecret": {"name": "k"}}}),
        *("spec.retriever.reranker.keySecret", "is set, but only an endpoint needs a key"),
        "leave it out, or set source to the URL of an endpoint",
    ),
    Bad(
        "two backends",
        _C,
        cache(
            retriever={
                "backend": {
                    "postgres": {"urlSecret": {"name": "a"}},
                    "milvus": {"urlSecret": {"name": "a"}},
                }
            }
        ),
        *("spec.retriever.backend.milvus", "is set together with postgres"),
        "keep the one that has your documents",
    ),
    Bad(
        "replicas with Milvus",
        _C,
        cache(retriever={"replicas": 2, "backend": {"milvus": {"urlSecret": {"name": "a"}}}}),
        "spec.retriever.replicas",
        "is above 1, but the documents are on the volume of one pod",
        "use 1, or set backend.postgres",
    ),
    Bad(
        "replicas of the embedded retriever",
        _C,
        cache(retriever={"replicas": 2}),
        "spec.retriever.replicas",
        "is above 1, but the documents are on the volume of one pod",
        "use 1, or set backend.postgres",
    ),
    Bad(
        "another backend",
        _C,
        cache(retriever={"backend": {"postgres": {"urlSecret": {"name": "a"}}}}),
        "spec.retriever.backend",
        "is immutable: the documents would stay in the old backend",
        "keep it, or restore a backup into another RagCache",
        old=cache(),
    ),
    Bad(
        "another volume for documents",
        _C,
        cache(retriever={"storage": {"size": "20Gi"}}),
        "spec.retriever.storage",
        "is immutable: Kubernetes does not change the claims of a StatefulSet",
        "keep it, or create another RagCache",
        old=cache(),
    ),
    Bad(
        *("no engines", _S, cache(engines=[])),
        *("spec.engines", "is empty", _EMPTY_LIST),
    ),
    Bad(
        *("too many engines", _S, cache(engines=[{"name": f"e{i}"} for i in range(17)])),
        *("spec.engines", "has 17 items", "use at most 16"),
    ),
    Bad(
        *("engines that are no list", _S, cache(engines={})),
        *("spec.engines", "{} is not a list", "write a list"),
    ),
    Bad(
        *("engine with a capital", _S, cache(engines=[{"name": "Main"}])),
        *("spec.engines[0].name", "'Main' is not a valid DNS label", _LABEL),
    ),
    Bad(
        *("engine name too long", _S, cache(engines=[{"name": "m" * 16}])),
        *("spec.engines[0].name", "is longer than 15 characters", "shorten it"),
    ),
    Bad(
        *("engine name twice", _S, cache(engines=[{"name": "a"}, {"name": "b"}, {"name": "a"}])),
        *("spec.engines[2].name", "'a' is used twice", "use a different name"),
        server="spec.engines[2]",
    ),
    *(
        Bad(
            *(f"URL of an engine: {url}", _S, cache(engines=[{"url": url}])),
            *("spec.engines[0].url", f"{url!r} is not a valid URL of an engine"),
            "write it like http://vllm.models.svc:8000, with a port and without a path",
        )
        for url in (
            *("https://vllm:8000", "http://vllm", "http://vllm:8000/v1", "http://vllm:65536"),
            *(
                "vllm:8000",
                "http://user@vllm:8000",
                "http://a:1,http://b:1",
                "http://a:1;records=2",
            ),
        )
    ),
    *(
        Bad(
            *(f"{field} of an engine with a URL", layer, external(**{field: value})),
            *(f"spec.engines[0].{field}", *_WITH_URL),
        )
        for field, layer, value in (
            ("replicas", _C, 2),
            ("args", _C, ["--seed=1"]),
            ("unsafeArgs", _C, ["--model-impl=vllm"]),
            ("autoscaling", _C, {"maxReplicas": 2}),
            ("scheduling", _C, {"nodeSelector": {"a": "b"}}),
            ("kvMemory", _W, "4Gi"),
            ("hostTier", _W, "1Gi"),
            ("resources", _W, {"cpu": "2"}),
        )
    ),
    Bad(
        *("unknown device", _S, cache(engines=[{"device": "cuda"}])),
        *("spec.engines[0].device", "'cuda' is not allowed", "use 'cpu'"),
    ),
    Bad(
        *("no KV memory", _S, cache(engines=[{"kvMemory": "0Gi"}])),
        *("spec.engines[0].kvMemory", "0Gi is not above zero", "write a value like 512Mi or 2Gi"),
    ),
    Bad(
        *("KV memory below zero", _S, cache(engines=[{"kvMemory": "-1Gi"}])),
        *("spec.engines[0].kvMemory", "-1Gi is not above zero", "write a value like 512Mi or 2Gi"),
    ),
    Bad(
        *("KV memory above 63 bits", _W, cache(engines=[{"kvMemory": "9Ei"}])),
        *("spec.engines[0].kvMemory", "'9Ei' needs more than 63 bits", _BYTES),
    ),
    Bad(
        *("arguments in one string", _S, cache(engines=[{"args": "--max-num-seqs 8"}])),
        *("spec.engines[0].args", "'--max-num-seqs 8' is not a list", "write a list"),
    ),
    Bad(
        *("argument that is a number", _S, cache(engines=[{"args": ["--seed=1", 8]}])),
        *("spec.engines[0].args[1]", "8 is not a string", "write a string"),
    ),
    Bad(
        *("flag and value as two items", _C, cache(engines=[{"args": ["--seed=1", "8"]}])),
        *("spec.engines[0].args[1]", "'8' does not begin with two dashes"),
        "write each flag with its value as one item, like --max-num-seqs=8",
        server="spec.engines[0].args",
    ),
    Bad(
        *("argument that loads code", _C, cache(engines=[{"args": ["--trust-remote-code"]}])),
        *("spec.engines[0].args[0]", "--trust-remote-code is not among the flags that args takes"),
        _LEAVE_OR_MOVE,
    ),
    Bad(
        *("weights as pickles", _C, cache(engines=[{"args": ["--load-format=pt"]}])),
        "spec.engines[0].args[0]",
        "--load-format=pt is misspelled, or has no valid value: it takes one of auto, safetensors",
        "write it as one item, like --load-format=auto",
    ),
    Bad(
        *("allowed flag, abbreviated", _C, cache(engines=[{"args": ["--max-num-seq=8"]}])),
        *("spec.engines[0].args[0]", "--max-num-seq is not among the flags that args takes"),
        f"write --max-num-seqs, or {_LEAVE_OR_MOVE}",
    ),
    Bad(
        *("switch with a value", _C, cache(engines=[{"args": ["--async-scheduling=on"]}])),
        *("spec.engines[0].args[0]", "--async-scheduling=on is misspelled, or has a value"),
        "write --async-scheduling",
    ),
    Bad(
        *("argument of several ranks", _C, cache(engines=[{"args": ["--tensor-parallel-size=2"]}])),
        "spec.engines[0].args[0]",
        "--tensor-parallel-size asks for several ranks, and an engine has one",
        "leave it out, and set spec.engines[].replicas",
    ),
    Bad(
        *("unsafe argument in its short form", _S, cache(engines=[{"unsafeArgs": ["-tp=2"]}])),
        *("spec.engines[0].unsafeArgs[0]", "'-tp=2' is not a valid argument of vLLM's server"),
        _UNSAFE,
    ),
    Bad(
        *("unsafe argument with _", _S, cache(engines=[{"unsafeArgs": ["--hf_overrides={}"]}])),
        "spec.engines[0].unsafeArgs[0]",
        *("'--hf_overrides={}' is not a valid argument of vLLM's server", _UNSAFE),
    ),
    Bad(
        *("argument that moves the server", _C, cache(engines=[{"unsafeArgs": ["--port=1"]}])),
        "spec.engines[0].unsafeArgs[0]",
        *("--port changes the address or protocol of the engine's server", "leave it out"),
    ),
    Bad(
        *("argument that has a field", _C, cache(engines=[{"unsafeArgs": ["--dtype=half"]}])),
        *("spec.engines[0].unsafeArgs[0]", "--dtype is set by a field of the RagCache"),
        "set spec.model.dtype",
    ),
    Bad(
        *("abbreviated argument", _C, cache(engines=[{"unsafeArgs": ["--max-mo=9"]}])),
        "spec.engines[0].unsafeArgs[0]",
        "--max-mo, short for --max-model-len, is set by a field of the RagCache",
        "set spec.model.maxLength",
    ),
    Bad(
        *("engine that wants a key", _C, cache(engines=[{"unsafeArgs": ["--api-key=secret"]}])),
        "spec.engines[0].unsafeArgs[0]",
        *("--api-key makes the engine reject the gateway's requests", "leave it out"),
    ),
    Bad(
        "another connector, by a key of its value",
        _C,
        cache(engines=[{"unsafeArgs": ["--kv-transfer-config.kv_connector=x"]}]),
        "spec.engines[0].unsafeArgs[0]",
        *("--kv-transfer-config replaces an argument that RagCache sets", "leave it out"),
    ),
    Bad(
        "another connector, by vLLM's offloading",
        _C,
        cache(engines=[{"unsafeArgs": ["--kv-offloading-size=4"]}]),
        "spec.engines[0].unsafeArgs[0]",
        "--kv-offloading-size replaces RagCache's connector with vLLM's own offloading of KV",
        "leave it out, and set spec.engines[].hostTier",
    ),
    Bad(
        "one of a family of flags",
        _C,
        cache(engines=[{"unsafeArgs": ["--data-parallel-rank=1"]}]),
        "spec.engines[0].unsafeArgs[0]",
        "--data-parallel-rank asks for several ranks, and an engine has one",
        "leave it out, and set spec.engines[].replicas",
    ),
    Bad(
        "another model under the same name",
        _C,
        cache(engines=[{"unsafeArgs": ["--hf-overrides.rope_theta=1"]}]),
        "spec.engines[0].unsafeArgs[0]",
        "--hf-overrides changes the model, while stored KV is named by the model's folder",
        "make a model folder with these settings, and name it with pvc: or path:",
    ),
    Bad(
        "KV of another type",
        _C,
        cache(engines=[{"unsafeArgs": ["--kv-cache-dtype=fp8"]}]),
        "spec.engines[0].unsafeArgs[0]",
        "--kv-cache-dtype changes or discards KV, which the engine refuses at start",
        "leave it out",
    ),
    Bad(
        "engine's maxReplicas below replicas",
        _C,
        cache(engines=[{"replicas": 2, "autoscaling": {"maxReplicas": 1}}]),
        "spec.engines[0].autoscaling.maxReplicas",
        "is below replicas",
        "use at least the value of replicas, or lower replicas",
    ),
    Bad(
        "engine's memory below its KV cache",
        _W,
        cache(engines=[{"kvMemory": "4Gi", "resources": {"memory": "2Gi"}}]),
        "spec.engines[0].resources.memory",
        "2Gi is not above the 4Gi of kvMemory",
        "use well over 4Gi, or leave it out to derive it",
    ),
    Bad(
        "engine's memory below its KV cache and host tier",
        _W,
        cache(engines=[{"kvMemory": "4Gi", "hostTier": "2Gi", "resources": {"memory": "6Gi"}}]),
        "spec.engines[0].resources.memory",
        "6Gi is not above the 4Gi and 2Gi of kvMemory and hostTier",
        "use well over 4Gi and 2Gi, or leave it out to derive it",
    ),
    Bad(
        "no host tier",
        _S,
        cache(engines=[{"hostTier": "0Gi"}]),
        "spec.engines[0].hostTier",
        "0Gi is not above zero",
        "write a value like 512Mi or 2Gi",
    ),
    Bad(
        "memory limit below the request",
        _W,
        cache(gateway={"resources": {"memory": "1Gi", "memoryLimit": "512Mi"}}),
        "spec.gateway.resources.memoryLimit",
        *("512Mi is below the memory request, 1Gi", "use 1Gi or more"),
    ),
    Bad(
        *("cores in words", _S, cache(gateway={"resources": {"cpu": "two"}})),
        "spec.gateway.resources.cpu",
        *("'two' is not a quantity", "write cores as a Kubernetes quantity, like 250m or 2"),
    ),
    Bad(
        *("no shards", _S, cache(cacheStore={"shards": 0})),
        *("spec.cacheStore.shards", "0 is too small", "use at least 1"),
    ),
    Bad(
        *("memory with a fraction", _S, cache(cacheStore={"memory": 1.5})),
        *("spec.cacheStore.memory", "'1.5' is not a quantity", _BYTES),
    ),
    Bad(
        *("unknown policy", _S, cache(cacheStore={"policy": "clairvoyant"})),
        *("spec.cacheStore.policy", "'clairvoyant' is not allowed"),
        "use 'score', 'pgdsf', 'lru' or 'cachecraft'",
    ),
    Bad(
        "admission by score without policy score",
        _C,
        cache(cacheStore={"policy": "lru", "admission": "score"}),
        "spec.cacheStore.admission",
        "score requires policy score, and policy is another one",
        "use policy score, or admission always or secondTouch",
    ),
    Bad(
        *("lossy precision", _S, cache(cacheStore={"precision": {"key": "int8"}})),
        *("spec.cacheStore.precision.key", "'int8' is not allowed", "use 'native' or 'packed'"),
    ),
    Bad(
        *("unknown reuse mode", _S, cache(reuse={"mode": "off"})),
        *("spec.reuse.mode", "'off' is not allowed", "use 'exact' or 'blend'"),
    ),
    Bad(
        *("share above one", _S, cache(reuse={"mode": "blend", "maxRecomputeShare": 1.5})),
        *("spec.reuse.maxRecomputeShare", "1.5 is too large", "use at most 1.0"),
    ),
    Bad(
        *("share below zero", _S, cache(reuse={"maxRecomputeShare": -0.1})),
        *("spec.reuse.maxRecomputeShare", "-0.1 is too small", "use at least 0.0"),
    ),
    Bad(
        *("share in quotes", _S, cache(reuse={"maxRecomputeShare": "0.2"})),
        "spec.reuse.maxRecomputeShare",
        *("'0.2' is not a number", "write a number, without quotes"),
    ),
    Bad(
        *("quality in per cent", _S, cache(reuse={"mode": "blend", "quality": 95})),
        *("spec.reuse.quality", "95 is too large", "use at most 1.0"),
    ),
    Bad(
        *("quality by name", _S, cache(reuse={"quality": "high"})),
        *("spec.reuse.quality", "'high' is not a number", "write a number, without quotes"),
    ),
    Bad(
        *("collector without http", _S, cache(telemetry={"otlp": {"endpoint": "collector:4317"}})),
        *("spec.telemetry.otlp.endpoint", "'collector:4317' is not a valid URL of a collector"),
        "write it like http://collector:4318",
    ),
    Bad(
        *("telemetry to nowhere", _S, cache(telemetry={"otlp": {}})),
        *("spec.telemetry.otlp.endpoint", "is missing", "add it"),
    ),
    Bad(
        *("memory too small for a value", _W, cache(cacheStore={"memory": "1Mi"})),
        *(
            "spec.cacheStore.memory",
            "1Mi is too small for values in transit",
        ),
        "use at least 64Mi, and at least four times the size of the largest variant",
    ),
    Bad(
        "store's memory limit below its memory tier",
        _W,
        cache(cacheStore={"memory": "2Gi", "resources": {"memoryLimit": "2Gi"}}),
        "spec.cacheStore.resources.memoryLimit",
        "2Gi is not above the 2Gi of memory",
        "use well over 2Gi, or leave it out to derive it",
    ),
    Bad(
        "another class for the store's disks",
        _C,
        cache(cacheStore={"disk": {"size": "4Gi", "className": "fast"}}),
        "spec.cacheStore.disk",
        "is immutable: Kubernetes does not change the claims of a StatefulSet",
        "keep it, or create another RagCache",
        old=cache(cacheStore={"disk": {"size": "4Gi"}}),
    ),
    Bad(
        *("label key with a space", _W, cache(scheduling={"nodeSelector": {"a b": "c"}})),
        *("spec.scheduling.nodeSelector.a b", "'a b' is not a valid key of a label"),
        "write it like disk or example.com/disk",
    ),
    Bad(
        *("label value with a slash", _S, cache(scheduling={"nodeSelector": {"disk": "a/b"}})),
        *("spec.scheduling.nodeSelector.disk", "'a/b' is not a valid value of a label"),
        "use letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    ),
    Bad(
        *(
            "toleration with an unknown operator",
            _S,
            cache(scheduling={"tolerations": [{"operator": "Has"}]}),
        ),
        *("spec.scheduling.tolerations[0].operator", "'Has' is not allowed"),
        "use 'Equal' or 'Exists'",
    ),
    Bad(
        *("toleration without a key", _C, cache(scheduling={"tolerations": [{"value": "a"}]})),
        *("spec.scheduling.tolerations[0].key", "is missing, and operator is not Exists"),
        "name the taint's key",
    ),
    Bad(
        "toleration by Exists with a value",
        _C,
        cache(scheduling={"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
        "spec.scheduling.tolerations[0].value",
        *("is set, but operator Exists ignores it", "leave it out, or use Equal"),
    ),
    Bad(
        "toleration with seconds but without NoExecute",
        _C,
        cache(scheduling={"tolerations": [{"key": "a", "tolerationSeconds": 5}]}),
        "spec.scheduling.tolerations[0].tolerationSeconds",
        *("is set, but effect is not NoExecute", "leave it out, or use NoExecute"),
    ),
    Bad(
        "pull secret twice",
        _S,
        cache(scheduling={"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}),
        "spec.scheduling.imagePullSecrets[1].name",
        *("'a' is used twice", "use a different name"),
        server="spec.scheduling.imagePullSecrets[1]",
    ),
    Bad(
        *("unknown policy for data", _S, cache(dataPolicy="Keep")),
        *("spec.dataPolicy", "'Keep' is not allowed", "use 'Retain' or 'Delete'"),
    ),
    Bad(
        *("switch in words", _S, cache(networkPolicy={"enabled": "yes"})),
        *("spec.networkPolicy.enabled", "'yes' is neither true nor false"),
        "write true or false, without quotes",
    ),
    Bad(
        *("client without a selector", _S, cache(networkPolicy={"clients": [{}]})),
        "spec.networkPolicy.clients[0]",
        *("has no selector", "set namespaceSelector, podSelector or both"),
    ),
    Bad(
        "In without values",
        _C,
        cache(
            networkPolicy={
                "clients": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]
            }
        ),
        "spec.networkPolicy.clients[0].podSelector.matchExpressions[0].values",
        "do not fit the operator",
        "list at least one for In and NotIn, none for Exists and DoesNotExist",
    ),
    Bad(
        *("unknown field", _P, cache(gateway={"prot": 1})),
        *("spec.gateway.prot", "unknown field", "did you mean port?"),
    ),
    Bad(
        *("field in another spelling", _P, cache(engines=[{"kv_memory": "1Gi"}])),
        *("spec.engines[0].kv_memory", "unknown field", "did you mean kvMemory?"),
    ),
)

_COLLECTIONS = (
    Bad(
        *("name with a dot (collection)", _S, collection("a.b")),
        *("metadata.name", "'a.b' is not a valid DNS label", _LABEL),
    ),
    Bad(
        *("documents for no RagCache", _S, collection(cacheRef=None)),
        *("spec.cacheRef", "is missing"),
        "write cacheRef: {name: my-cache}, the RagCache that stores the documents",
    ),
    Bad(
        *("RagCache with an invalid name", _S, collection(cacheRef={"name": "Docs"})),
        *("spec.cacheRef.name", "'Docs' is not a valid DNS label", _LABEL),
    ),
    Bad(
        "another RagCache",
        _C,
        collection(cacheRef={"name": "other"}),
        "spec.cacheRef.name",
        "is immutable: the documents would stay in the old RagCache",
        "delete this RagCollection and create one for the other RagCache",
        old=collection(),
    ),
    Bad(
        *("collection with an invalid name", _S, collection(collection="Hand book")),
        *("spec.collection", "'Hand book' is not a valid DNS label", _LABEL),
    ),
    Bad(
        "another collection",
        _C,
        collection(collection="manual"),
        "spec.collection",
        "is immutable: the documents would stay in the old collection",
        "delete this RagCollection and create one for the other collection",
        old=collection(),
    ),
    Bad(
        *("overlap of half (collection)", _C, collection(chunking={"size": 64})),
        "spec.chunking.overlap",
        *("is not less than half of size", "use about an eighth of the size"),
    ),
    Bad(
        *("weight of words above its range", _S, collection(lexicalWeight=1.5)),
        *("spec.lexicalWeight", "1.5 is too large", "use at most 1.0"),
    ),
    Bad(
        *("weight of words in words", _S, collection(lexicalWeight="half")),
        *("spec.lexicalWeight", "'half' is not a number", "write a number, without quotes"),
    ),
    Bad(
        *("pruning in words", _S, collection(prune="no")),
        *("spec.prune", "'no' is neither true nor false", "write true or false, without quotes"),
    ),
    Bad(
        *("interval in words", _S, collection(sync={"interval": "5 minutes"})),
        *(
            "spec.sync.interval",
            "'5 minutes' is not a valid duration",
            "write it like 90s, 5m or 1h30m",
        ),
    ),
    Bad(
        *("interval too short", _C, collection(sync={"interval": "5s"})),
        *("spec.sync.interval", "is out of range", "use 10s to 24h"),
    ),
    Bad(
        *("interval too long", _C, collection(sync={"interval": "24h1s"})),
        *("spec.sync.interval", "is out of range", "use 10s to 24h"),
    ),
    Bad(
        *("documents from nowhere", _S, collection(sources=[])),
        *("spec.sources", "is empty", _EMPTY_LIST),
    ),
    Bad(
        *("sources left out", _S, collection(sources=None)),
        *("spec.sources", "is missing"),
        "write sources: [{configMap: {name: my-documents}}], or another source",
    ),
    Bad(
        "too many sources",
        _S,
        collection(sources=[{"configMap": {"name": f"c{i}"}} for i in range(33)]),
        *("spec.sources", "has 33 items", "use at most 32"),
    ),
    Bad(
        *("source without a kind", _S, source()),
        *("spec.sources[0]", "names no source", "set one of configMap, volume, http, git"),
    ),
    Bad(
        "source with two kinds",
        _S,
        source(configMap={"name": "c"}, http={"url": "https://example.com/a.zip"}),
        *("spec.sources[0]", "names 2 sources: configMap, http"),
        "put each into a separate item",
    ),
    Bad(
        *("ConfigMap without a name", _S, source(configMap={})),
        *("spec.sources[0].configMap.name", "is missing", "add it"),
    ),
    Bad(
        *("folder above the volume", _S, source(volume={"claimName": "c", "path": "../x"})),
        *("spec.sources[0].volume.path", "'../x' is not a valid relative folder", _PATH),
    ),
    Bad(
        *("folder of the node", _S, source(volume={"claimName": "c", "path": "/etc"})),
        *("spec.sources[0].volume.path", "'/etc' is not a valid relative folder", _PATH),
    ),
    Bad(
        *("URL of another kind", _S, source(http={"url": "ftp://example.com/a.zip"})),
        *("spec.sources[0].http.url", "'ftp://example.com/a.zip' is not a valid URL", _URL),
    ),
    Bad(
        *("password in a URL", _S, source(http={"url": "https://me:pw@example.com/a.zip"})),
        *("spec.sources[0].http.url", "'https://me:pw@example.com/a.zip' is not a valid URL", _URL),
    ),
    Bad(
        "ref that is an option",
        _S,
        source(git={"url": "https://example.com/a.git", "ref": "--upload-pack=x"}),
        *("spec.sources[0].git.ref", "'--upload-pack=x' is not a valid branch, tag or commit"),
        "write it like main, v1.2 or a commit's hash",
    ),
    Bad(
        "bearer token without a Secret",
        _S,
        source(http={"url": "https://example.com/a.zip", "bearerSecret": {}}),
        *("spec.sources[0].http.bearerSecret.name", "is missing", "add it"),
    ),
    Bad(
        *("unknown source", _P, source(configMap={"name": "c"}, s3={"bucket": "b"})),
        "spec.sources[0].s3",
        *("unknown field", "the fields here are configMap, volume, http, git"),
    ),
)

BAD: tuple[Bad, ...] = (*_CACHES, *_COLLECTIONS)
