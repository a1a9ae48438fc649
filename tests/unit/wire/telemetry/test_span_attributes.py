"""Attributes of spans by two conventions: their names, and that no text gets into them."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openinference.semconv import trace as openinference
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import GenAiOperationNameValues

from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry import span_attributes
from ragcache_wire.telemetry.span_attributes import MAX_DOCUMENTS
from ragcache_wire.tracing import Tracer

GENERATIVE = "gen_ai."
OTHER_PREFIXES = ("input.", "output.", "llm.", "embedding.", "reranker.", "retrieval.", "document.")

VALUES = st.one_of(
    st.text(max_size=8),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.none(),
    st.lists(st.text(max_size=8), max_size=2),
)
FIELDS = st.sampled_from(
    ("temperature", "top_p", "seed", "n", "max_tokens", "stop", "user", "messages", "logit_bias")
)
SCORES = st.lists(st.tuples(st.text(max_size=8), st.floats(allow_nan=False)), max_size=80)


def test_names_of_openinference_are_those_of_one_version_of_it() -> None:
    assert version("openinference-semantic-conventions") == names.OPENINFERENCE_VERSION
    known = {
        value
        for kind in (
            openinference.SpanAttributes,
            openinference.DocumentAttributes,
            openinference.RerankerAttributes,
        )
        for value in vars(kind).values()
        if isinstance(value, str)
    }
    ours = {
        value
        for value in vars(names).values()
        if isinstance(value, str) and value.startswith(OTHER_PREFIXES)
    }
    assert len(ours) == 18
    assert ours | {names.SPAN_KIND} <= known


def test_kinds_and_operations_are_those_of_the_conventions() -> None:
    kinds = {kind.value for kind in openinference.OpenInferenceSpanKindValues}
    operations = {one.value for one in GenAiOperationNameValues}
    found = vars(names).items()
    assert {value for name, value in found if name.startswith("KIND_")} <= kinds
    assert {value for name, value in found if name.startswith("OPERATION_")} - {
        names.OPERATION_NAME
    } <= operations


def test_a_model_call_has_both_kinds_of_names() -> None:
    body = {"model": "m", "temperature": 1, "seed": 3, "max_completion_tokens": 9, "n": 2}
    found = span_attributes.model_call({**body, "stream": True}, is_chat=True)
    assert found[names.SPAN_KIND] == "LLM"
    assert found[names.OPERATION_NAME] == "chat"
    assert found[names.REQUEST_MODEL] == found[names.LLM_MODEL] == "m"
    assert found[names.REQUEST_TEMPERATURE] == 1.0
    assert isinstance(found[names.REQUEST_TEMPERATURE], float)
    assert (found[names.REQUEST_SEED], found[names.REQUEST_MAX_TOKENS]) == (3, 9)
    assert (found[names.REQUEST_CHOICE_COUNT], found[names.REQUEST_STREAM]) == (2, True)
    parameters = json.loads(str(found[names.LLM_PARAMETERS]))
    assert parameters == {name: value for name, value in body.items() if name != "model"} | {
        "stream": True
    }
    used = span_attributes.model_usage(7, 2, 5)
    assert used[names.USAGE_INPUT_TOKENS] == used[names.LLM_PROMPT_TOKENS] == 7
    assert used[names.USAGE_OUTPUT_TOKENS] == used[names.LLM_COMPLETION_TOKENS] == 2
    assert used[names.USAGE_CACHE_READ_TOKENS] == used[names.LLM_CACHED_TOKENS] == 5
    assert used[names.LLM_TOTAL_TOKENS] == 9
    assert names.LLM_CACHED_TOKENS not in span_attributes.model_usage(7, 2)


@given(st.dictionaries(FIELDS, VALUES))
def test_a_clients_fields_become_attributes_that_can_be_exported(body: dict[str, Any]) -> None:
    found = span_attributes.model_call(body, is_chat=False)
    for name, value in found.items():
        if isinstance(value, int):
            assert abs(value) < 1 << 63
        if name not in (names.LLM_PARAMETERS, names.SPAN_KIND, names.OPERATION_NAME):
            assert value == names.PROVIDER or not isinstance(value, str)
    parameters = json.loads(str(found[names.LLM_PARAMETERS]))
    assert all(isinstance(value, int | float) for value in parameters.values())
    assert not {"stop", "user", "messages", "logit_bias"} & set(parameters)


@given(SCORES)
def test_results_have_ids_and_scores_up_to_a_limit(scores: list[tuple[str, float]]) -> None:
    found = span_attributes.retrieved(scores)
    first = scores[:MAX_DOCUMENTS]
    listed = json.loads(str(found[names.RETRIEVAL_DOCUMENTS]))
    assert [(one["id"], one["score"]) for one in listed] == first
    for index, (name, score) in enumerate(first):
        assert found[f"retrieval.documents.{index}.document.id"] == name
        assert found[f"retrieval.documents.{index}.document.score"] == score
    assert len(found) == 2 * len(first) + 1


@pytest.mark.parametrize("exports_content", [False, True])
def test_all_attributes_of_a_full_search_fit_into_a_span(exports_content: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider, exports_content=exports_content)
    scores = [(f"d#{number}", 1.0 / (1 + number)) for number in range(100)]
    with tracer.start_request("Search", ()) as span:
        span.set(hits=100, embed_s=0.1, search_s=0.1, **span_attributes.retrieval("default"))
        span.set(**span_attributes.retrieved(scores))
        texts = span_attributes.with_texts(names.RETRIEVED_DOCUMENTS, [one for one, _ in scores])
        span.set_content(**{names.INPUT_VALUE: "q", names.RETRIEVAL_QUERY: "q"}, **texts)
    [kept] = exporter.get_finished_spans()
    assert kept.dropped_attributes == 0
    attributes = dict(kept.attributes or {})
    assert attributes[names.SPAN_KIND] == "RETRIEVER"
    content = {name for name in attributes if name.endswith(names.DOCUMENT_CONTENT)}
    assert len(content) == (MAX_DOCUMENTS if exports_content else 0)
    assert (names.INPUT_VALUE in attributes) is exports_content
    tracer.close()
