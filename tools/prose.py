"""Check names and prose against docs/glossary.md, and sentences against a length limit.

Run it on files or folders (default: the whole repository)::

    python -m tools.prose [--most N] [PATH ...]

Names are those that Python code and protos define. Prose is Markdown, docstrings, comments, log
messages, error messages, and the descriptions of fields and options. The last line is a summary.
The exit status is 1 if anything was reported.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
MOST_WORDS: Final = 35
_GENERATED: Final = ("wire/ragcache_wire/v1/",)
_EXEMPT: Final = ("docs/glossary.md", "tools/prose.py", "LICENSE")
_LOG_METHODS: Final = {"debug", "info", "warning", "error", "exception", "critical"}
_DESCRIBING: Final = {"description", "help", "internal"}
_SECTION: Final = re.compile(
    r"^(Args|Returns|Raises|Yields|Source|Sources|Attributes|Note|Example)s?:"
)
_ITEM: Final = re.compile(r"^(?:[-*+]|\d+[.)]|\|)\s*|^[\w`*./\[\], -]{1,40}:(?=\s|$)")
_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|vs|cf|eq|eqs|etc|Fig|No|al)\.")
_DRAWING: Final = "─│┌└▼▲▶"
_CODE_INDENT: Final = 4
_NAME_PART: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_WORD: Final = re.compile(r"[A-Za-z][\w'-]*")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose: one paragraph, list item or message."""

    line: int
    words: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One violation."""

    path: str
    line: int
    message: str


class Glossary:
    """The words that docs/glossary.md rules out, in names and in prose."""

    def __init__(self, page: str) -> None:
        self.names: dict[str, str] = {}
        self._prose: dict[str, str] = {}
        table = page.partition("## Words to avoid")[2]
        for row in table.splitlines():
            cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
            if len(cells) != 3 or "`" not in cells[0]:
                continue
            for word in re.findall(r"`([^`]+)`", cells[0]):
                if "names" in cells[1]:
                    self.names[word] = cells[2]
                if "prose" in cells[1]:
                    self._prose[word] = cells[2]
        alternatives = "|".join(re.escape(word) for word in sorted(self._prose, key=len)[::-1])
        self._pattern = re.compile(rf"(?<![\w/-])({alternatives})(?![\w/-])", re.IGNORECASE)

    def in_name(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each ruled-out word of an identifier with its replacement."""
        for part in _NAME_PART.findall(name.replace("in_place", "")):
            if part.lower() in self.names:
                yield part.lower(), self.names[part.lower()]

    def in_prose(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each ruled-out word or phrase of a text with its replacement."""
        for match in self._pattern.finditer(re.sub(r"`[^`]*`|https?://\S+", "x", text)):
            yield match[1], self._prose[match[1].lower()]


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences; inline code counts as one word."""
    plain = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    plain = _ABBREVIATION.sub(r"\1", plain)
    return [
        part for part in re.split(r"(?<=[.!?])[)\"'*]*\s+(?=[\"'(*]*[A-Z0-9a-z])", plain) if part
    ]


def num_words(sentence: str) -> int:
    """Count the words of a sentence; numbers and symbols do not count."""
    return len(_WORD.findall(sentence))


def paragraphs(text: str, first_line: int = 1, *, markdown: bool = False) -> Iterator[Text]:
    """Split prose into paragraphs and list items, without headings, drawings and code blocks.

    Args:
        markdown: Whether a block indented by four columns is code. In docstrings code follows
            a line that ends with two colons.
    """
    gathered: list[str] = []
    start = first_line
    fenced = literal = False

    def taken() -> Iterator[Text]:
        if gathered:
            yield Text(start, " ".join(gathered))
            gathered.clear()

    for number, raw in enumerate(text.splitlines(), first_line):
        line = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if line.startswith(("```", "~~~")):
            yield from taken()
            fenced = not fenced
            continue
        if not line:
            yield from taken()
            literal = literal or (markdown and not gathered)
            continue
        if fenced or (literal and indent >= _CODE_INDENT and not _ITEM.match(line)):
            continue
        literal = False
        if line.startswith(("#", "<!--")) or any(symbol in line for symbol in _DRAWING):
            yield from taken()
            continue
        if line.startswith("|"):
            yield from taken()
            for cell in line.strip("|").split("|"):
                if num_words(cell):
                    yield Text(number, cell.strip())
            continue
        if _SECTION.match(line) or _ITEM.match(line):
            yield from taken()
            line = _SECTION.sub("", line).strip()
        if not gathered:
            start = number
        if line:
            gathered.append(line)
        literal = line.endswith("::")
    yield from taken()


def python_prose(source: str, tree: ast.Module) -> Iterator[tuple[str, Text]]:
    """Yield (kind, text) of docstrings, comments, messages and descriptions of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                for text in paragraphs(docstring, node.body[0].lineno):
                    yield "docstring", text
        elif isinstance(node, ast.Call):
            yield from _messages(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for text in _strings([*node.exc.args, *(word.value for word in node.exc.keywords)]):
                yield "message", text
    yield from _comments(source)


def _messages(call: ast.Call) -> Iterator[tuple[str, Text]]:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _LOG_METHODS:
        for text in _strings(call.args[:1]):
            yield "log", text
    for keyword in call.keywords:
        if keyword.arg in _DESCRIBING:
            for text in _strings([keyword.value]):
                yield "description", text


def _strings(nodes: Iterable[ast.expr]) -> Iterator[Text]:
    for node in nodes:
        parts = [
            inner.value
            for inner in ast.walk(node)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
        ]
        if parts:
            yield Text(node.lineno, " ".join(parts))


def _comments(source: str) -> Iterator[tuple[str, Text]]:
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#:! ").strip()
        if re.match(r"noqa|type:|pragma|ruff:|/usr|mypy:", words):
            continue
        if block and token.start[0] != last + 1:
            yield "comment", Text(start, " ".join(block))
            block = []
        if not block:
            start = token.start[0]
        block.append(words)
        last = token.start[0]
    if block:
        yield "comment", Text(start, " ".join(block))


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything a module defines: its own words, not those of libraries."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str() as name):
                yield getattr(node, "lineno", 0), name
            case _:
                pass


def check_python(path: str, source: str, glossary: Glossary) -> Iterator[Problem]:
    """Yield the violations of one Python file."""
    tree = ast.parse(source)
    for part in Path(path).parts:
        for word, instead in glossary.in_name(part.removesuffix(".py")):
            yield Problem(path, 1, f"file name has {word!r}: {instead}")
    seen: set[tuple[str, str]] = set()
    for line, name in defined_names(tree):
        for word, instead in glossary.in_name(name):
            if (name, word) not in seen:
                seen.add((name, word))
                yield Problem(path, line, f"name {name} has {word!r}: {instead}")
    for kind, text in python_prose(source, tree):
        yield from check_text(path, kind, text, glossary)


def check_text(path: str, kind: str, text: Text, glossary: Glossary) -> Iterator[Problem]:
    """Yield the violations of one paragraph."""
    for word, instead in glossary.in_prose(text.words):
        yield Problem(path, text.line, f"{kind} has {word!r}: {instead}")
    for sentence in sentences(text.words):
        if num_words(sentence) > MOST_WORDS:
            start = " ".join(sentence.split()[:8])
            words = num_words(sentence)
            yield Problem(path, text.line, f"{kind}: a sentence of {words} words: {start} ...")


def check_proto(path: str, source: str, glossary: Glossary) -> Iterator[Problem]:
    """Yield the violations of one proto file."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        code, _, comment = line.partition("//")
        for name in re.findall(r"[A-Za-z_]\w*", code):
            for word, instead in glossary.in_name(name):
                yield Problem(path, number, f"name {name} has {word!r}: {instead}")
        if comment and not code.strip():
            block.append(comment.strip())
            continue
        if block:
            yield from check_text(path, "comment", Text(number - 1, " ".join(block)), glossary)
            block = []
        if comment:
            yield from check_text(path, "comment", Text(number, comment.strip()), glossary)


def check_file(path: Path, glossary: Glossary) -> list[Problem]:
    """All violations of one file, in order of its lines."""
    name = path.relative_to(ROOT).as_posix()
    source = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            found = list(check_python(name, source, glossary))
        case ".proto":
            found = list(check_proto(name, source, glossary))
        case _:
            found = [
                problem
                for text in paragraphs(source, markdown=True)
                for problem in check_text(name, "text", text, glossary)
            ]
    return sorted(found, key=lambda problem: problem.line)


def repository_files(under: Iterable[str] = ()) -> list[Path]:
    """The Python, proto and Markdown files of the repository, or of some of its folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *under],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [
        ROOT / name
        for name in sorted(set(listed))
        if name.endswith((".py", ".proto", ".md"))
        and not name.startswith(_GENERATED)
        and name not in _EXEMPT
        and (ROOT / name).is_file()
    ]


def main() -> int:
    """Check the files named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="files or folders; default: the repository")
    parser.add_argument("--most", type=int, default=200, help="print at most this many")
    given = parser.parse_args()
    glossary = Glossary(GLOSSARY.read_text(encoding="utf-8"))
    files = repository_files(given.paths)
    problems = [problem for path in files for problem in check_file(path, glossary)]
    for problem in problems[: given.most]:
        print(f"{problem.path}:{problem.line}: {problem.message}")
    print(f"prose: {len(files)} files, {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
