"""Documents are split at their natural borders, and no text is lost."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.documents.chunking import Chunk, first_heading, split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.token_counter import CountTokens
from tests.kit.retriever import tokenizer_of

SPECIAL_CHARACTERS = string.punctuation + string.whitespace + "…。！？」』”’）"  # noqa: RUF001
LENGTH = 4_000
MAX_COUNTS = 64
"""How often each character of a text may be counted, on average."""


def count_words(text: str) -> int:
    return len(text.split())


def count_bytes(text: str) -> int:
    """Like a tokenizer that knows no words: no text is short because it has few words."""
    return len(text.encode())


def split_words(text: str, size: int, overlap: int = 0, *, markdown: bool = True) -> list[Chunk]:
    chunking = Chunking(size, overlap)
    return split_document(text, markdown=markdown, chunking=chunking, count_tokens=count_words)


def words(count: int, stem: str) -> str:
    return " ".join(f"{stem}{i}" for i in range(count))


def texts(chunks: list[Chunk]) -> list[str]:
    return [chunk.text for chunk in chunks]


def without_space(text: str) -> str:
    return "".join(text.split())


words_and_marks = [
    "word ",
    "Sentence ends. ",
    "Is it? ",
    "e.g. this ",
    "汉字。",
    "🙂",
    "x" * 40 + " ",
]
blanks_and_code = [
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "    code\n",
    "```\n",
    "~~~~\n",
    "> ```\n",
    "<pre>\n",
]
lines = [
    "# One\n",
    "## Two\n",
    "### Three ###\n",
    "- item\n",
    "1. item\n",
    "  - item\n",
    "| a | b |\n",
]
lines += ["|---|---|\n", "====\n", "---\n", "<h2>Four</h2>\n", "<!-- no\n", "-->\n"]
pieces = st.sampled_from([*words_and_marks, *blanks_and_code, *lines])
documents = st.one_of(st.lists(pieces, max_size=60).map("".join), st.text(max_size=300))
chunkings = st.integers(16, 64).flatmap(
    lambda size: st.builds(Chunking, st.just(size), st.integers(0, (size - 1) // 2))
)
counters = st.sampled_from([count_words, count_bytes])


@given(text=documents, markdown=st.booleans(), chunking=chunkings, count=counters)
def test_no_chunk_is_larger_than_its_size(
    text: str, markdown: bool, chunking: Chunking, count: CountTokens
) -> None:
    for chunk in split_document(text, markdown=markdown, chunking=chunking, count_tokens=count):
        assert count(chunk.text) <= chunking.size_tokens
        assert chunk.text == chunk.text.rstrip()
        assert chunk.text.strip(" \t") == chunk.text.strip()
        assert chunk.text


@given(text=documents, markdown=st.booleans(), chunking=chunkings)
def test_no_chunk_is_larger_in_tokens_of_a_real_tokenizer(
    tiny_model: Path, text: str, markdown: bool, chunking: Chunking
) -> None:
    count = tokenizer_of(tiny_model).count
    for chunk in split_document(text, markdown=markdown, chunking=chunking, count_tokens=count):
        assert count(chunk.text) <= chunking.size_tokens


def own_texts(chunk: Chunk) -> set[str]:
    """Return what may be the chunk's slice of the document, without white space.

    Up to three lines before it may be repeated: those that name the columns of a table.
    """
    lines = chunk.text.split("\n")
    return {without_space("\n".join(lines[num_repeated:])) for num_repeated in range(4)} - {""}


@given(text=documents, markdown=st.booleans(), size=st.integers(16, 64), count=counters)
def test_chunks_without_overlap_are_the_document(
    text: str, markdown: bool, size: int, count: CountTokens
) -> None:
    whole = without_space(text.removeprefix("\ufeff"))
    chunks = split_document(text, markdown=markdown, chunking=Chunking(size, 0), count_tokens=count)
    ends = {0}
    for chunk in chunks:
        own = own_texts(chunk)
        ends = {end + len(one) for end in ends for one in own if whole.startswith(one, end)}
    assert len(whole) in ends


@given(text=documents, markdown=st.booleans(), chunking=chunkings, count=counters)
def test_chunks_with_overlap_cover_the_document_in_order(
    text: str, markdown: bool, chunking: Chunking, count: CountTokens
) -> None:
    whole = without_space(text.removeprefix("\ufeff"))
    covered = 0
    chunks = split_document(text, markdown=markdown, chunking=chunking, count_tokens=count)
    for chunk in chunks:
        # A text that repeats itself may be found in several places; the furthest leaves the least
        # for the chunks after it to cover, so a gap shows as a chunk that fits nowhere.
        ends = [
            start + len(own)
            for own in own_texts(chunk)
            for start in range(max(0, covered - len(own)), covered + 1)
            if whole.startswith(own, start)
        ]
        assert ends
        covered = max(covered, *ends)
    assert covered == len(whole)


@given(text=documents, chunking=chunkings)
def test_code_keeps_all_its_lines(text: str, chunking: Chunking) -> None:
    chunks = split_document(
        text, markdown=False, chunking=Chunking(16, 0), count_tokens=count_words, code=True
    )
    joined = "".join(texts(chunks))
    assert without_space(joined) == without_space(text.removeprefix("\ufeff"))


def test_a_short_document_is_one_chunk_with_its_heading() -> None:
    text = "# Billing\n\nIt runs in region north.\n"
    assert split_words(text, 64) == [Chunk("# Billing\n\nIt runs in region north.", ("Billing",))]


def sentence(count: int, stem: str) -> str:
    return words(count, stem).capitalize() + "."


@pytest.mark.parametrize(
    ("overlap", "chunks"),
    [
        pytest.param(
            0, [words(10, "a"), f"{words(4, 'b')}. {words(8, 'c')}"], id="paragraph over sentence"
        ),
        pytest.param(
            0,
            [f"# A\n\n{words(8, 'a')}", f"# B\n\n{words(2, 'b')}\n\n{words(4, 'c')}"],
            id="section over paragraph",
        ),
        pytest.param(0, [words(12, "a"), f"# B\n\n{words(12, 'b')}"], id="no heading at the end"),
        pytest.param(
            7,
            [f"{sentence(8, 'a')} {sentence(4, 'b')}", f"# C\n\n{words(9, 'c')}"],
            id="no overlap into a section",
        ),
    ],
)
def test_a_chunk_of_16_words_ends_at_the_strongest_border(overlap: int, chunks: list[str]) -> None:
    assert texts(split_words("\n\n".join(chunks), 16, overlap)) == chunks


def test_a_chunk_that_would_be_less_than_half_full_ends_between_sentences() -> None:
    first, second, third = words(4, "a"), words(6, "b") + ".", words(10, "c").capitalize()
    chunks = texts(split_words(f"{first}\n\n{second} {third}", 16))
    assert chunks == [f"{first}\n\n{second}", third]


def test_a_later_chunk_begins_with_the_last_sentences_that_fit_of_the_one_before() -> None:
    a, b, c, d = (sentence(n, f"part{n}x") for n in (7, 5, 4, 6))
    for overlap, last in ((0, d), (3, d), (4, f"{c} {d}")):
        assert texts(split_words(f"{a} {b} {c} {d}", 16, overlap)) == [f"{a} {b} {c}", last]
    a, b, c = (sentence(n, f"part{n}x") for n in (9, 7, 12))
    assert texts(split_words(f"{a} {b} {c}", 16, overlap=7)) == [f"{a} {b}", c], "c needs the room"


def test_a_heading_path_names_the_sections_a_chunk_begins_in() -> None:
    parts = [
        f"# Guide\n\n{words(12, 'a')}",
        f"## Setup\n\n### Linux\n\n{words(10, 'b')}",
        words(12, "c"),
        f"## Use\n\n{words(12, 'd')}",
    ]
    chunks = split_words("\n\n".join(parts), 16)
    assert texts(chunks) == parts
    assert [chunk.heading_path for chunk in chunks] == [
        ("Guide",),
        ("Guide", "Setup", "Linux"),
        ("Guide", "Setup", "Linux"),
        ("Guide", "Use"),
    ]


def test_a_heading_stays_out_of_later_chunks() -> None:
    text = "# Guide\n\n" + "One two three four five. " * 6
    first, *later = texts(split_words(text, 16))
    assert first.startswith("# Guide")
    assert later
    assert not any("Guide" in chunk for chunk in later)


def test_a_code_fence_that_fits_is_not_split() -> None:
    code = "```\n" + "\n\n".join(f"step {i}" for i in range(5)) + "\n# no heading\n```"
    before, after = words(6, "a"), words(8, "b")
    chunks = split_words(f"{before}\n\n{code}\n\n{after}", 16)
    assert chunks == [Chunk(before, ()), Chunk(code, ()), Chunk(after, ())]


def test_a_code_fence_that_does_not_fit_is_split_between_lines_and_opened_again() -> None:
    lines = [f"call {i} with argument" for i in range(12)]
    chunks = texts(split_words("```sh\n" + "\n".join(lines) + "\n```", 20))
    assert len(chunks) > 1
    assert all(chunk.startswith("```sh\ncall") for chunk in chunks)
    assert [line for chunk in chunks for line in chunk.split("\n")[1:]] == [*lines, "```"]


def function(i: int) -> str:
    return f"def step_{i}(state):\n    first = {i}\n\n    return first"


def test_code_is_split_at_empty_lines_between_functions() -> None:
    functions = [function(i) for i in range(6)]
    for chunk in texts(split_words("```python\n" + "\n\n".join(functions) + "\n```", 24)):
        assert chunk.startswith("```python\ndef step_")
        assert chunk.removesuffix("\n```").endswith("    return first")


def test_a_text_of_code_is_split_before_the_lines_that_are_indented_least() -> None:
    tenants = [f"  tenant-{i}:\n    limits:\n      burst: {i}\n      daily: {i}" for i in range(6)]
    text = "tenants:\n" + "\n".join(tenants)
    chunks = split_document(
        text, markdown=False, chunking=Chunking(16, 0), count_tokens=count_words, code=True
    )
    first, *later = texts(chunks)
    assert later
    assert "\n".join([first, *later]) == text
    assert all(chunk.startswith("  tenant-") for chunk in later)


def test_code_in_a_list_and_nested_items_keep_their_indentation() -> None:
    code = "1. Do this.\n\n   ```sh\n" + "\n".join(f"     call {i} with it" for i in range(9))
    _, *later = texts(split_words(code + "\n   ```", 16))
    assert all(chunk.startswith("   ```sh\n     call") for chunk in later)
    items = "- top\n" + "\n".join(f"  - nested item number {i}" for i in range(9))
    _, *later = texts(split_words(items, 16))
    assert all(chunk.startswith("  - nested") for chunk in later)


def table(header: str, rows: int) -> str:
    return header + "\n" + "\n".join(f"| part {i} | 12 |" for i in range(rows))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ("| Part | Price |\n|---|---|", 32),
        ("Part | Price\n--- | ---:", 24),
        ("|  |  |\n| --- | --- |\n| Name | Cost |", 64),
    ],
)
def test_the_rows_that_name_columns_are_in_each_chunk_of_a_table(header: str, size: int) -> None:
    text = table(header, 40)
    chunks = texts(split_words(text, size))
    assert len(chunks) > 2
    assert all(chunk.startswith(header + "\n| part") for chunk in chunks)
    rows = [line for chunk in chunks for line in chunk.removeprefix(header).split("\n")[1:]]
    assert rows == text.removeprefix(header).split("\n")[1:]


def test_rows_that_overlap_have_the_names_of_columns_once() -> None:
    header = "| Part | Price |\n|---|---|"
    chunks = texts(split_words(table(header, 20), 32, overlap=8))
    assert len(chunks) > 2
    for before, after in pairwise(chunks):
        assert after.startswith(f"{header}\n{before.splitlines()[-1]}\n")
        assert after.count("Price") == 1


def test_a_long_row_is_divided_and_each_part_has_the_names_of_columns() -> None:
    header = "| Part | Price |\n|---|---|"
    chunks = texts(split_words(f"{header}\n| {words(50, 'a')} | 12 |", 32))
    assert len(chunks) > 1
    assert all(chunk.startswith(header + "\n") for chunk in chunks)


def test_names_of_columns_over_a_quarter_of_a_chunk_are_not_repeated() -> None:
    header = "| " + " | ".join(f"Name{i}" for i in range(9)) + " |\n" + "|---" * 9 + "|"
    chunks = texts(split_words(table(header, 40), 32))
    assert [chunk.startswith(header) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_text_after_a_table_has_no_names_of_columns() -> None:
    text = table("| Part | Price |\n|---|---|", 8) + "\n\n" + words(30, "after")
    assert not any(
        "Price" in chunk and "after20" in chunk for chunk in texts(split_words(text, 32))
    )


def test_a_chunk_ends_before_a_heading_though_it_has_room() -> None:
    sections = [f"## Part {i}\n\n{words(12, 'abc'[i])}." for i in range(3)]
    chunks = split_words("\n\n".join(["# All", *sections]), 48)
    assert texts(chunks) == [f"# All\n\n{sections[0]}", *sections[1:]]
    assert [chunk.heading_path[-1] for chunk in chunks] == ["Part 0", "Part 1", "Part 2"]


def test_small_sections_under_one_parent_share_a_chunk() -> None:
    def group(name: str) -> str:
        return f"# {name}\n\n" + "\n\n".join(f"## {name}{i}\n\n{words(4, 'a')}." for i in range(3))

    chunks = split_words(group("A") + f"\n\n{words(20, 'b')}.\n\n" + group("C"), 64)
    assert texts(chunks)[0].startswith("# A")
    assert texts(chunks)[1].startswith("## A2"), "a long section shares no chunk"
    assert texts(chunks)[2] == group("C")
    assert chunks[2].heading_path == ("C",), "no section has most of it"


def test_the_heading_of_a_chunk_is_that_of_most_of_its_text() -> None:
    text = f"# Q9\n\nRead it.\n\n## Safety\n\n{words(12, 'a')}."
    assert split_words(text, 80) == [Chunk(text, ("Q9", "Safety"))]


def test_a_sentence_longer_than_a_chunk_is_split_between_words() -> None:
    chunks = texts(split_words(words(50, "a"), 16))
    assert [count_words(chunk) for chunk in chunks] == [16, 16, 16, 2]
    assert " ".join(chunks) == words(50, "a")


def test_text_without_spaces_is_split_too() -> None:
    chunking = Chunking(16, 0)
    chunks = split_document("x" * 1000, markdown=False, chunking=chunking, count_tokens=count_bytes)
    assert [len(chunk.text) for chunk in chunks] == [16] * 62 + [8]


def test_a_long_gap_inside_a_sentence_is_no_text() -> None:
    chunks = split_document(
        "a" + " " * 99 + "b", markdown=False, chunking=Chunking(16, 0), count_tokens=len
    )
    assert texts(chunks) == ["a", "b"]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_line_ends_make_no_difference(ending: str) -> None:
    text = "# A\n\nOne two three. Four five.\n\n- six\n- seven\n"
    assert split_words(text.replace("\n", ending), 16) == split_words(text, 16)


def test_plain_text_has_no_headings() -> None:
    text = "# a comment, not a heading\nOne two three."
    assert split_words(text, 32, markdown=False) == [Chunk(text, ())]


def test_list_items_and_table_rows_are_borders() -> None:
    items = "\n".join(f"{i}. Step number {i} of many" for i in range(6))
    for chunk in texts(split_words(items, 16)):
        assert re.fullmatch(r"(\d\. Step number \d of many\n?)+", chunk)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("intro\n\n## Deep ##\n", "Deep"),
        ("Guide\r\n=====\r\n", "Guide"),
        ("```\n# no\n```\n# Yes", "Yes"),
        ("text", None),
    ],
)
def test_the_first_heading(text: str, title: str | None) -> None:
    assert first_heading(text) == title


def test_a_title_far_down_is_no_title_of_the_document() -> None:
    assert first_heading("text\n" * 20_000 + "# Far\n") is None
    assert first_heading("x" * 80_000 + "\n# Near\n") is None


repeated = st.builds(
    lambda part, count: part * count,
    st.sampled_from([*string.punctuation, *" \t\nxA1。…", "a. ", "- a\n", "|\n", "# a\n", "```\n"]),
    st.sampled_from([1, 2, 3, 40, 400]),
)


@given(
    parts=st.lists(repeated, min_size=1, max_size=4),
    chunking=st.sampled_from([Chunking(16, 7), Chunking(256, 32), Chunking(1024, 500)]),
    count=counters,
)
def test_no_text_is_counted_often(parts: list[str], chunking: Chunking, count: CountTokens) -> None:
    pattern = "".join(parts)
    text = pattern * (1 + 20_000 // len(pattern))
    counted_chars = 0

    def counting(part: str) -> int:
        nonlocal counted_chars
        counted_chars += len(part)
        return count(part)

    split_document(text, markdown=True, chunking=chunking, count_tokens=counting)
    assert counted_chars <= MAX_COUNTS * len(text)


def repeats(text: str) -> Callable[[int], str]:
    """Return what makes a text of a length."""
    return lambda n: text * (n // len(text))


hard_texts: dict[str, Callable[[int], str]] = {
    **{f"many {mark!r}": repeats(mark) for mark in SPECIAL_CHARACTERS},
    **{f"lines of {mark!r}": repeats(f"{mark}\n") for mark in "`#|-.*"},
    "backticks and one more": lambda n: "`" * n + "x`",
    "tildes and backticks": lambda n: "~" * (n // 2) + "`" * (n // 2),
    "a list number after a gap": lambda n: "Ab." + " " * (n // 2) + "X. " + "x. " * (n // 6),
    "a gap before each mark": lambda n: ("a" + " " * 99 + ". ") * (n // 102),
    "gaps of the whole text": lambda n: "a." + " " * n + "b",
    "an indented line": lambda n: "a\n" + " \t" * (n // 2) + "b",
    "an open fence": lambda n: "```\n" + "a\n" * (n // 2),
    "a long fence": lambda n: "`" * (n // 2) + "\n" + "`\n" * (n // 4),
    "hashes of a title": lambda n: "# a" + " #" * (n // 2),
    "open comments": repeats("<!-- a\n\n"),
    "open HTML headings": repeats("<h1>\n"),
    "long HTML headings": repeats("<h1>" + "[a](" * 200 + "</h1>\n"),
    "titles of braces": repeats("# " + "{#a" * 60 + " {}" * 60 + "}\n"),
    "open pre-formatted text": repeats("<pre>\n\n"),
    "underlines": repeats("a\n---\n"),
    "small sections": repeats("# a\n\nb\n\n## c\n\nd\n\n"),
    "headings alone": repeats("# a\n\n## b\n\n"),
    "tables of one row": repeats("|a|b|\n|-|-|\n|c|d|\n\n"),
    "delimiter rows": repeats("|-|-|\n"),
    "indented code after gaps": repeats("    a\n" + "\n" * 40 + "b\n\n"),
    "open front matter": lambda n: "---\na: b\n" + "--\n" * (n // 3),
}


@pytest.mark.parametrize("make", hard_texts.values(), ids=hard_texts.keys())
def test_time_grows_no_faster_than_the_text(make: Callable[[int], str]) -> None:
    short, long = make(LENGTH), make(8 * LENGTH)
    long_s = cpu_s(long)
    # Twenty-four times the time is far from linear growth, and from quadratic, which is 64 times.
    assert long_s < 0.02 or long_s < 24 * cpu_s(short)


def cpu_s(text: str) -> float:
    """Least CPU time of some runs, so that a busy machine does not decide."""
    times_s = []
    for _ in range(3):
        began_s = time.thread_time()
        first_heading(text)
        split_document(text, markdown=True, chunking=Chunking(256, 32), count_tokens=len)
        times_s.append(time.thread_time() - began_s)
    return min(times_s)
