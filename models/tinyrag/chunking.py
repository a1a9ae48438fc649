"""Cuts a handbook page into chunks the way the retriever does: at sentence borders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.tinyrag.handbook import Document, Sentence, Stated


@dataclass(frozen=True)
class Chunk:
    """A piece of a page; `stated[i].start` counts characters from the start of `text`."""

    text: str
    stated: tuple[Stated, ...]


def cut(
    document: Document, count_tokens: Callable[[str], int], size: int, overlap: int
) -> list[Chunk]:
    """Chunks of at most about `size` tokens; each repeats the last `overlap` sentences before it.

    The first chunk starts with the page's heading.
    """
    parts: list[list[tuple[str, Sentence]]] = [[]]
    used = 0
    for joiner, sentence in _flow(document):
        length = count_tokens(joiner + sentence.text)
        current = parts[-1]
        if used + length > size and len(current) > overlap + 1:
            kept = current[len(current) - overlap :]
            used = sum(count_tokens(j + s.text) for j, s in kept)
            current = list(kept)
            parts.append(current)
        current.append((joiner, sentence))
        used += length
    return [_join(part) for part in parts]


def _flow(document: Document) -> Iterator[tuple[str, Sentence]]:
    """The page's sentences, heading first, each with what stands between it and the last one."""
    yield "", Sentence(f"# {document.title}")
    for paragraph in document.paragraphs:
        for index, sentence in enumerate(paragraph):
            yield ("\n\n" if index == 0 else " "), sentence


def _join(part: list[tuple[str, Sentence]]) -> Chunk:
    text = ""
    stated = []
    for joiner, sentence in part:
        text += joiner if text else ""
        stated += [Stated(s.attribute, s.value, s.start + len(text)) for s in sentence.stated]
        text += sentence.text
    return Chunk(text, tuple(stated))
