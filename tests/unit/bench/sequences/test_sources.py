"""Loading RAGPulse from files like its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.support.document_orders import OURS, make_ordering, reordered
from bench.support.sequences.requests import Part, RagPulse, SequenceRequest, Vocabulary

WORDS = Vocabulary(10_000, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ragpulse"
    folder.mkdir()
    lengths = {
        "1_sys_prompt": ("sys_prompt_id", {1: 40, 2: 4, **dict.fromkeys(range(1000, 1200), 30)}),
        "2_passages": ("passage_id", {10: 100, 11: 51}),
        "3_history": ("history_id", {20: 60}),
        "4_user_input": ("user_input_id", {30: 5}),
        "5_web_search": ("web_search_id", {40: 70}),
    }
    for name, (field, known) in lengths.items():
        lines = [json.dumps({field: i, "token_length": n}) for i, n in known.items()]
        (folder / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")
    trace = [
        {
            "sys_prompt": [1, 1000 + index, 2],
            "passages_ids": [11, 10],
            "history": [20],
            "web_search": [40],
            "user_input": [30],
        }
        for index in range(200)
    ]
    trace += [{**trace[0], "passages_ids": passages} for passages in ([], [10, 11, 10])]
    lines = [json.dumps({"hash_ids": ids}) for ids in trace]
    (folder / "0_trace.jsonl").write_text("\n".join(lines))
    return folder


def test_parts_keep_the_order_of_the_trace(folder: Path) -> None:
    [request] = RagPulse(folder, WORDS, 1.0, 8000).requests(3, 1)
    assert [(part.name, part.part, len(part.token_ids)) for part in request.parts] == [
        ("component 1", Part.STABLE, 40),
        ("component 1003", Part.CHANGING, 30),
        ("component 2", Part.CHANGING, 4),
        ("component 11", Part.PASSAGE, 51),
        ("component 10", Part.PASSAGE, 100),
        ("component 20", Part.TAIL, 60),
        ("component 40", Part.TAIL, 70),
        ("component 30", Part.TAIL, 5),
    ]


def test_lengths_are_scaled_up_to_the_next_token(folder: Path) -> None:
    [request] = RagPulse(folder, WORDS, 0.5, 8000).requests(0, 1)
    assert [len(part.token_ids) for part in request.parts] == [20, 15, 2, 26, 50, 30, 35, 3]


def test_a_prompt_that_is_too_long_loses_its_history(folder: Path) -> None:
    [request] = RagPulse(folder, WORDS, 1.0, 320).requests(0, 1)
    assert [part.name for part in request.parts[-2:]] == ["component 40", "component 30"]
    assert request.num_tokens == 300


def test_topics_are_the_passages_by_id(folder: Path) -> None:
    assert RagPulse(folder, WORDS, 1.0, 8000).topics() == ["component 10", "component 11"]


def test_our_order_puts_passages_first_that_were_computed(folder: Path) -> None:
    computed, other = RagPulse(folder, WORDS, 0.5, 8000).requests(199, 3)[:3:2]
    ordering = make_ordering(OURS, 100_000, 1)
    ordering.computed(computed, 0, 0.0)
    same_head = SequenceRequest((*computed.parts[:3], *other.parts[3:]))
    ordered = reordered(same_head, ordering.order(same_head))
    assert [part.name for part in same_head.passages][:2] == ["component 10", "component 11"]
    assert [part.name for part in ordered.passages][:2] == ["component 11", "component 10"]
    assert sorted(ordered.token_ids) == sorted(same_head.token_ids)
