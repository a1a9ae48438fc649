"""Rules between the fields of the retriever's spec."""

from __future__ import annotations

from ragcache_operator.spec.components.retriever import (
    CROSS_ENCODER,
    CROSS_ENCODER_MODEL,
    BackendSpec,
    EmbedderSpec,
    RerankerSpec,
    RetrieverSpec,
)
from ragcache_operator.spec.validation import Rule, cel_rule

RETRIEVER_RULES: tuple[Rule, ...] = (
    cel_rule(
        "no model name without an embeddings endpoint",
        EmbedderSpec,
        "model",
        "self.source.startsWith('http') || !has(self.model)",
        "is set, but only an endpoint has more than one model",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        "model name for an embeddings endpoint",
        EmbedderSpec,
        "model",
        "!self.source.startsWith('http') || has(self.model)",
        "is missing: an endpoint serves many models",
        "name one of them",
    ),
    cel_rule(
        "no API key without an embeddings endpoint",
        EmbedderSpec,
        "keySecret",
        "self.source.startsWith('http') || !has(self.keySecret)",
        "is set, but only an endpoint takes a key",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        "model of the reranker if there is one",
        RerankerSpec,
        "model",
        "self.source == 'none' || has(self.model)",
        "is missing: cross-encoder and a URL need a model",
        "name one",
    ),
    cel_rule(
        "no model without a reranker",
        RerankerSpec,
        "model",
        "self.source != 'none' || !has(self.model)",
        "is set, but the source none has no model",
        "leave it out, or set source to cross-encoder or the URL of an endpoint",
    ),
    cel_rule(
        "name or folder of a cross-encoder",
        RerankerSpec,
        "model",
        f"self.source != '{CROSS_ENCODER}' || !has(self.model) || "
        f"self.model.matches(r'^(?:{CROSS_ENCODER_MODEL})$')",
        "names no cross-encoder",
        "use ORGANISATION/NAME of the hub, pvc:CLAIM/FOLDER or path:FOLDER",
    ),
    cel_rule(
        "API key of the reranker only for an endpoint",
        RerankerSpec,
        "keySecret",
        "self.source.startsWith('http') || !has(self.keySecret)",
        "is set, but only an endpoint needs a key",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        "postgres or milvus",
        BackendSpec,
        "milvus",
        "!has(self.postgres) || !has(self.milvus)",
        "is set together with postgres",
        "keep the one that has your documents",
    ),
    cel_rule(
        "several retriever replicas only with PostgreSQL",
        RetrieverSpec,
        "replicas",
        "self.replicas == 1 || (has(self.backend) && has(self.backend.postgres))",
        "is above 1, but the documents are on the volume of one pod",
        "use 1, or set backend.postgres",
    ),
    cel_rule(
        "precision of the index only in the embedded backend",
        RetrieverSpec,
        "index",
        "!has(self.index) || self.index.precision == 'float32' || !has(self.backend) || "
        "(!has(self.backend.postgres) && !has(self.backend.milvus))",
        "has a precision that postgres and milvus do not use",
        "leave out precision, or use the embedded backend",
    ),
)
