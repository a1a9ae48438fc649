"""The code blocks, commands and headings of the repository's Markdown pages."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).resolve().parents[2]
_PARSER: Final = MarkdownIt("commonmark").enable("table")
_SHELL: Final = {"bash", "sh", "shell", "console"}
_PROGRAMS: Final = {
    *("ragcache", "make", "kubectl", "helm", "curl", "python", "python3", "pip", "docker", "ctr"),
    *("skopeo", "git", "source", "export", "for"),
}
_CONTROL: Final = {";", "&", "&&", "|", "||"}
_REDIRECTION: Final = re.compile(r"^[0-9]?[<>]+&?$")
_ASSIGNMENT: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
SUBSTITUTED: Final = "SUBSTITUTED"
"""What a command has in place of a ``$(...)``, whose commands are checked by themselves."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page, or code inside a sentence (kind ``inline``)."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def position(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One program with its arguments, as a reader would run it."""

    position: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.position}: {shlex.join(self.words)}"


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository with these patterns that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return sorted(path for name in set(listed) if (path := ROOT / name).is_file())


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page and the code inside its sentences."""
    page = path.relative_to(ROOT).as_posix()
    for token in _PARSER.parse(path.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            kind = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
            yield Block(page, line, "shell" if kind in _SHELL else kind, token.content)
        elif token.type == "code_block":
            yield Block(page, line, _guess(token.content), token.content)
        elif token.type == "inline":
            for child in token.children or ():
                if child.type == "code_inline":
                    yield Block(page, line, "inline", child.content)


def _guess(text: str) -> str:
    """The kind of a block without a name; empty if it is none that readers can use."""
    first = text.split(maxsplit=1)[0]
    if first in _PROGRAMS or _ASSIGNMENT.match(first):
        return "shell"
    if first in {"spec:", "apiVersion:"}:
        return "yaml"
    if first.startswith("{"):
        return "json"
    return "text" if any(mark in text for mark in "─├└▶▼") else ""


def commands(block: Block) -> list[Command]:
    """The commands of a shell block, those inside ``$(...)`` included.

    Raises:
        ValueError: A quotation or a ``$(`` does not end.
    """
    found: list[Command] = []
    loop: tuple[str, Sequence[str]] | None = None
    console = any(line.startswith("$ ") for line in block.text.splitlines())
    for line in _whole_lines(block.text, console=console):
        for command in _commands_of(block.position, line):
            match command.words:
                case ("for", name, "in", *values):
                    loop = (name, values)
                case ("done",):
                    loop = None
                case words:
                    found.extend(_repeated(command, words[words[0] == "do" :], loop))
    return found


def _repeated(
    command: Command, words: tuple[str, ...], loop: tuple[str, Sequence[str]] | None
) -> Iterator[Command]:
    """Yield a command, inside a loop once for each value of its variable."""
    if not words:
        return
    name, values = loop or ("", [""])
    for value in values:
        shown = (word.replace(f"${name}", value) for word in words) if name else words
        yield Command(command.position, tuple(shown))


def _whole_lines(text: str, *, console: bool) -> Iterator[str]:
    """Join lines that continue: by a backslash or inside a quotation."""
    gathered = ""
    for raw in text.splitlines():
        if console and not gathered and not raw.startswith("$ "):
            continue  # what a command printed
        line = gathered + (raw[2:] if console and not gathered else raw)
        try:
            ends = not line.endswith("\\")
            shlex.split(_without_substitutions(line)[0], comments=True)
        except ValueError:
            ends = False
        if ends:
            yield line
            gathered = ""
        else:
            gathered = line.removesuffix("\\") + ("\n" if not line.endswith("\\") else "")
    if gathered:
        raise ValueError(f"does not end: {gathered!r}")


def _without_substitutions(line: str) -> tuple[str, list[str]]:
    """A line with each outer ``$(...)`` replaced, and what was inside of them.

    Raises:
        ValueError: One of them does not end.
    """
    kept, inside = "", []
    while (begin := line.find("$(")) >= 0:
        depth, end = 1, begin + 2
        while depth:
            if end == len(line):
                raise ValueError(f"does not end: {line!r}")
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        kept += line[:begin] + SUBSTITUTED
        inside.append(line[begin + 2 : end - 1])
        line = line[end:]
    return kept + line, inside


def _commands_of(position: str, line: str) -> Iterator[Command]:
    plain, inside = _without_substitutions(line)
    for inner in inside:
        yield from _commands_of(position, inner)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in (*lexer, ";"):
        if word in _CONTROL:
            while words and _ASSIGNMENT.match(words[0]):
                words.pop(0)
            if words:
                yield Command(position, tuple(words))
            words = []
        elif _REDIRECTION.match(word):
            is_target = True
        elif is_target:
            is_target = False
        else:
            words.append(word)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    tokens = _PARSER.parse(path.read_text())
    for token, content in itertools.pairwise(tokens):
        if token.type != "heading_open":
            continue
        shown = "".join(child.content for child in content.children or ())
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        count = 1
        name = slug
        while name in found:
            name, count = f"{slug}-{count}", count + 1
        found.add(name)
    return found


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and target of each link and image of a page."""
    for token in _PARSER.parse(path.read_text()):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if isinstance(target, str):
                yield (token.map[0] + 1 if token.map else 0), target
