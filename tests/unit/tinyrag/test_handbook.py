"""The handbook generator and the prompt contract of the bundled model."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tinyrag import lexicon
from models.tinyrag.chunking import cut
from models.tinyrag.handbook import (
    ABSENT_ANSWER,
    Document,
    Handbook,
    Split,
    ask_absent,
    ask_single,
    ask_two_step,
    dependency_pairs,
    draw_name,
    is_held_out,
    main,
    make_handbook,
    plain_attributes,
    sample_questions,
)

SEEDS = st.integers(0, 2**32)
SPLITS = st.sampled_from(["train", "held_out"])


def _handbook(seed: int, size: int = 8) -> Handbook:
    return make_handbook(seed, size, "held_out")


def _sentences(document: Document) -> list[str]:
    return [sentence.text for paragraph in document.paragraphs for sentence in paragraph]


@given(SEEDS, SPLITS)
def test_names_belong_to_the_split_they_are_drawn_for(seed: int, split: Split) -> None:
    assert is_held_out(draw_name(random.Random(seed), split)) == (split == "held_out")


def test_about_one_name_in_eight_is_held_out() -> None:
    names = [
        f"{head}{tail} {second}"
        for head in lexicon.NAME_HEADS
        for tail in lexicon.NAME_TAILS
        for second in lexicon.NAME_SECONDS[::6]
    ]
    assert sum(map(is_held_out, names)) / len(names) == pytest.approx(1 / 8, abs=0.01)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_the_same_seed_gives_the_same_handbook_and_questions(seed: int) -> None:
    first, second = _handbook(seed), _handbook(seed)
    assert first == second
    assert sample_questions(first, 5, "held_out") == sample_questions(second, 5, "held_out")


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_a_page_names_its_service_only_in_title_and_opener(seed: int) -> None:
    for document in _handbook(seed).documents:
        opener, *rest = _sentences(document)
        assert document.text.startswith(f"# {document.title}\n\n")
        assert document.title in opener
        assert not any(document.title in sentence for sentence in rest)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_pages_state_just_the_facts_of_their_service(seed: int) -> None:
    handbook = _handbook(seed)
    for service, document in zip(handbook.services, handbook.documents, strict=True):
        assert document.facts == service.facts
        for paragraph in document.paragraphs:
            for sentence in paragraph:
                for stated in sentence.stated:
                    end = stated.start + len(stated.value)
                    assert sentence.text[stated.start : end] == stated.value


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_a_dependency_names_its_callers(seed: int) -> None:
    for first, second in dependency_pairs(_handbook(seed).documents):
        assert first.title in " ".join(s.text for s in second.paragraphs[0])


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_answers_stand_in_the_supporting_documents(seed: int) -> None:
    rng = random.Random(seed)
    documents = _handbook(seed).documents
    single = ask_single(rng, documents[0], rng.choice(list(documents[0].facts)))
    assert single.answer in documents[0].text
    assert single.supports == (documents[0].id,)
    for first, second in dependency_pairs(documents):
        question = ask_two_step(rng, first, second, rng.choice(plain_attributes(second)))
        assert question.answer.startswith(f"{second.title}, ")
        assert question.answer.endswith(second.facts[question.attribute])
        assert question.supports == (first.id, second.id)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_later_facts_are_stated_after_the_paragraph_that_names_the_service(seed: int) -> None:
    rng = random.Random(seed)
    for document in _handbook(seed).documents:
        for key, value in document.facts.items():
            early = any(
                (stated.attribute, stated.value) == (key, value)
                for sentence in document.paragraphs[0]
                for stated in sentence.stated
            )
            assert ask_single(rng, document, key).needs_earlier_chunk != early


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_what_is_absent_is_in_no_document(seed: int) -> None:
    rng = random.Random(seed)
    documents = _handbook(seed).documents
    question = ask_absent(rng, documents, "held_out")
    assert question.answer == ABSENT_ANSWER
    assert not question.supports
    needed = lexicon.DEPENDENCY if question.indirect else question.attribute
    assert not any(d.title == question.subject and needed in d.facts for d in documents)


def test_two_step_questions_need_the_dependency() -> None:
    documents = _handbook(3).documents
    first, second = dependency_pairs(documents)[0]
    wrong = next(d for d in documents if d not in (first, second))
    with pytest.raises(ValueError, match="does not depend on"):
        ask_two_step(random.Random(0), first, wrong, "owner")


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(0, 8))
def test_a_trimmed_page_is_a_prefix_that_keeps_its_first_paragraph(seed: int, missing: int) -> None:
    document = _handbook(seed, 1).documents[0]
    trimmed = document.without_tail(missing)
    assert trimmed.paragraphs[0] == document.paragraphs[0]
    kept = _sentences(trimmed)
    assert kept == _sentences(document)[: len(kept)]
    assert set(trimmed.facts) <= set(document.facts)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(10, 60), st.integers(0, 1))
def test_chunks_cover_the_page_and_keep_their_facts(seed: int, size: int, overlap: int) -> None:
    document = _handbook(seed, 1).documents[0]
    chunks = cut(document, lambda text: len(text.split()), size, overlap)
    assert chunks[0].text.startswith(f"# {document.title}")
    assert all(document.title not in chunk.text for chunk in chunks[2:])
    for sentence in _sentences(document):
        assert any(sentence in chunk.text for chunk in chunks)
    for chunk in chunks:
        assert chunk.text in document.text
        for stated in chunk.stated:
            assert chunk.text[stated.start :].startswith(stated.value)


def test_values_follow_a_space_and_questions_never_start_with_a_name() -> None:
    for attribute in lexicon.ATTRIBUTES:
        for phrase in (*attribute.predicates, *attribute.possessives):
            assert phrase.count("{v}") == 1
            assert " {v}" in phrase
        assert all(" {s}" in question for question in attribute.questions)


def test_command_writes_markdown_and_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, questions = tmp_path / "pages", tmp_path / "questions.jsonl"
    arguments = ["--seed", "5", "--documents", "12", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["handbook.py", *arguments, "--questions", str(questions)])
    main()
    pages = {path.stem: path.read_text() for path in out.glob("*.md")}
    assert pages == {d.id: d.text + "\n" for d in make_handbook(5, 12, "held_out").documents}
    assert len(questions.read_text().splitlines()) == 36
