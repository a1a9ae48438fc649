"""Rules between the fields of the retriever's spec."""

from __future__ import annotations

import re

from ragcache_operator.spec.components.retriever import (
    CROSS_ENCODER,
    CROSS_ENCODER_MODEL,
    BackendSpec,
    EmbedderSpec,
    RerankerSpec,
    RetrieverSpec,
)
from ragcache_operator.spec.validation import CelRule, Rule, Violation


def _no_model_without_a_url(embedder: EmbedderSpec) -> Violation | None:
    if embedder.is_endpoint or embedder.model is None:
        return None
    return Violation(
        "is set, but only an endpoint has more than one model",
        "leave it out, or set source to the URL of an endpoint",
    )


def _model_with_a_url(embedder: EmbedderSpec) -> Violation | None:
    if not embedder.is_endpoint or embedder.model is not None:
        return None
    return Violation("is missing: an endpoint serves many models", "name one of them")


def _no_key_without_a_url(embedder: EmbedderSpec) -> Violation | None:
    if embedder.is_endpoint or embedder.key_secret is None:
        return None
    return Violation(
        "is set, but only an endpoint takes a key",
        "leave it out, or set source to the URL of an endpoint",
    )


def _model_fits_the_reranker(reranker: RerankerSpec) -> Violation | None:
    has_models = reranker.source not in ("none", "bundled")
    if has_models and reranker.model is None:
        return Violation(f"is missing: {reranker.source} needs a model", "name one")
    if not has_models and reranker.model is not None:
        return Violation(
            f"is set, but source {reranker.source} has no choice of models",
            "leave it out, or set source to cross-encoder or the URL of an endpoint",
        )
    return None


def _cross_encoder_is_named(reranker: RerankerSpec) -> Violation | None:
    model = reranker.model
    if reranker.source != CROSS_ENCODER or model is None:
        return None
    if re.fullmatch(CROSS_ENCODER_MODEL, model, re.ASCII):
        return None
    return Violation(
        f"{model!r} names no cross-encoder",
        "use ORGANISATION/NAME of the hub, pvc:CLAIM/FOLDER or path:FOLDER",
    )


def _key_fits_the_reranker(reranker: RerankerSpec) -> Violation | None:
    if reranker.source.startswith("http") or reranker.key_secret is None:
        return None
    return Violation(
        f"is set, but source {reranker.source} needs no key",
        "leave it out, or set source to the URL of an endpoint",
    )


def _one_backend(backend: BackendSpec) -> Violation | None:
    if backend.postgres is None or backend.milvus is None:
        return None
    return Violation("is set together with postgres", "keep the one that has your documents")


def _replicas_fit_the_backend(retriever: RetrieverSpec) -> Violation | None:
    if retriever.replicas == 1 or retriever.backend.kind != "milvus":
        return None
    return Violation(
        f"{retriever.replicas} is not possible with backend milvus: replicas do not share its "
        "vectors",
        "use 1, or another backend",
    )


def _precision_fits_the_backend(retriever: RetrieverSpec) -> Violation | None:
    if retriever.index.precision == "float32" or retriever.backend.kind == "embedded":
        return None
    return Violation(
        f"has precision {retriever.index.precision}, which backend {retriever.backend.kind} does "
        "not use",
        "leave out precision, or use the embedded backend",
    )


RETRIEVER_RULES: tuple[Rule, ...] = (
    Rule(
        "no model name without an embeddings endpoint",
        EmbedderSpec,
        "model",
        _no_model_without_a_url,
        CelRule(
            "self.source.startsWith('http') || !has(self.model)",
            "is set, but only an endpoint has more than one model; leave it out, or set source to "
            "the URL of an endpoint",
        ),
    ),
    Rule(
        "model name for an embeddings endpoint",
        EmbedderSpec,
        "model",
        _model_with_a_url,
        CelRule(
            "!self.source.startsWith('http') || has(self.model)",
            "is missing: an endpoint serves many models; name one of them",
        ),
    ),
    Rule(
        "no API key without an embeddings endpoint",
        EmbedderSpec,
        "keySecret",
        _no_key_without_a_url,
        CelRule(
            "self.source.startsWith('http') || !has(self.keySecret)",
            "is set, but only an endpoint takes a key; leave it out, or set source to the URL of "
            "an endpoint",
        ),
    ),
    Rule(
        "model of the reranker if there is a choice",
        RerankerSpec,
        "model",
        _model_fits_the_reranker,
        CelRule(
            "(self.source in ['none', 'bundled']) != has(self.model)",
            "does not fit source: cross-encoder and a URL need a model, none and bundled allow "
            "none; name one, or leave it out",
        ),
    ),
    Rule(
        "name or folder of a cross-encoder",
        RerankerSpec,
        "model",
        _cross_encoder_is_named,
        CelRule(
            f"self.source != '{CROSS_ENCODER}' || !has(self.model) || "
            f"self.model.matches(r'^(?:{CROSS_ENCODER_MODEL})$')",
            "names no cross-encoder; use ORGANISATION/NAME of the hub, pvc:CLAIM/FOLDER or "
            "path:FOLDER",
        ),
    ),
    Rule(
        "API key of the reranker only for an endpoint",
        RerankerSpec,
        "keySecret",
        _key_fits_the_reranker,
        CelRule(
            "self.source.startsWith('http') || !has(self.keySecret)",
            "is set, but only an endpoint needs a key; leave it out, or set source to the URL of "
            "an endpoint",
        ),
    ),
    Rule(
        "postgres or milvus",
        BackendSpec,
        "milvus",
        _one_backend,
        CelRule(
            "!has(self.postgres) || !has(self.milvus)",
            "is set together with postgres; keep the one that has your documents",
        ),
    ),
    Rule(
        "one retriever replica with Milvus",
        RetrieverSpec,
        "replicas",
        _replicas_fit_the_backend,
        CelRule(
            "self.replicas == 1 || !has(self.backend) || !has(self.backend.milvus)",
            "must be 1 with Milvus, because replicas do not share its vectors; use 1, or another "
            "backend",
        ),
    ),
    Rule(
        "precision of the index only in the embedded backend",
        RetrieverSpec,
        "index",
        _precision_fits_the_backend,
        CelRule(
            "!has(self.index) || self.index.precision == 'float32' || !has(self.backend) || "
            "(!has(self.backend.postgres) && !has(self.backend.milvus))",
            "has a precision that postgres and milvus do not use; leave out precision, or use the "
            "embedded backend",
        ),
    ),
)
