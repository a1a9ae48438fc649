"""The code blocks, commands and headings of the repository's Markdown pages."""

from __future__ import annotations

import enum
import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer
from markdown_it import MarkdownIt

from ragcache_cli.main import app
from tests.kit.sources import pdf

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


def cli_commands() -> dict[tuple[str, ...], Any]:
    """Return the commands, without groups, by their words."""
    return dict(_below((), typer.main.get_command(app)))


def parse(words: list[str]) -> tuple[str, ...]:
    """Parse the words after ``ragcache`` and return those of the command; nothing runs.

    Raises what the parser raises.
    """
    command: Any = typer.main.get_command(app)
    context, found = None, list[str]()
    while hasattr(command, "commands"):
        context = command.make_context("ragcache", [], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        found.append(name)
    command.make_context(found[-1], list(words), parent=context)
    return tuple(found)


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, one in command.commands.items():
        yield from _below((*words, name), one)


PAGES: Final = tracked(
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md", "charts/**/README.md"
)
_INLINE: Final = ("ragcache ", "kubectl ragcache ", "make ", "python -m bench.", "python -m tools.")
"""How code inside a sentence begins that is a command as a whole."""

_ALONE: Final = {"completion", "doctor", "keys", "render", "size"}
"""Commands that need neither a platform nor a network."""
_WITH_GATEWAY: Final = {
    *("ask", "backup", "collection", "explain", "ingest", "restore", "top", "usage"),
}
_ELSEWHERE: Final = {
    "up": "tests/integration/cli/test_up.py",
    "down": "tests/integration/cli/test_up.py",
    "status": "tests/integration/cli/test_platform.py",
    "logs": "tests/integration/cli/test_platform.py",
    "sync": "tests/integration/cli/test_sync.py",
    "erasure": "tests/attack/test_erasure.py",  # needs a deleted document
    "quality": "tests/unit/cli/commands/test_quality.py",  # a verdict needs more documents
    "install": "tests/integration/cli/test_cluster.py",
    "model": "tests/unit/cli/models/test_cache.py",
}
"""Commands that need processes, a cluster or the package index, and the tests that run them."""


class RunBy(enum.Enum):
    """Which test runs a command as it is written."""

    ALONE = "tests/unit/docs/test_commands.py"
    GATEWAY = "tests/integration/cli/test_documentation.py"
    OTHER = "a test of the command with other arguments"


@cache
def all_blocks() -> tuple[Block, ...]:
    """Return the code of all pages."""
    return tuple(block for path in PAGES for block in blocks(path))


@cache
def all_commands() -> tuple[Command, ...]:
    """Return the commands of all pages."""
    found = [
        command for block in all_blocks() if block.kind == "shell" for command in commands(block)
    ]
    for block in all_blocks():
        is_command = block.kind == "inline" and block.text.startswith(_INLINE)
        if is_command and "bench.NAME" not in block.text:
            words = shlex.split(block.text.replace("...", ""))
            if words[0] == "ragcache" and all(word.isalpha() for word in words):
                words.append("--help")  # a sentence names the command and no arguments
            found.append(Command(block.position, tuple(words)))
    return tuple(found)


def run_by(words: tuple[str, ...]) -> RunBy:
    """Return which test runs a ``ragcache`` command.

    Args:
        words: Those after ``ragcache``.

    Raises:
        KeyError: No test is known to run it.
    """
    if "--help" in words or words[:2] == ("model", "list"):
        return RunBy.ALONE
    if words[0] in _ALONE:
        return RunBy.OTHER if "FILE" in words else RunBy.ALONE
    if words[0] in _WITH_GATEWAY:
        return RunBy.GATEWAY
    if not (ROOT / _ELSEWHERE[words[0]]).is_file():
        raise KeyError(words[0])
    return RunBy.OTHER


def write_reader_folder(folder: Path) -> None:
    """Write the files that a reader of the documentation is assumed to have."""
    shutil.copy(ROOT / "examples" / "quickstart.yaml", folder / "ragcache.yaml")
    for name in ("examples", "models"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("docs", "handbook"):
        (folder / name).mkdir()
        (folder / name / "billing.md").write_text("# Billing\n\nBilling runs in eu-north.\n")
        (folder / name / "search.md").write_text("# Search\n\nSearch runs in us-east.\n")
    (folder / "a.md").write_text("# Alerts\n\nAlerts go to the pager.\n")
    for name in ("b.pdf", "contract.pdf", "report.pdf"):
        (folder / name).write_bytes(pdf(["Backups run at night."], title="Report"))
    (folder / "backup.key").write_text("5c" * 32 + "\n")
    (folder / "notes.txt").write_text("The café opens at noon.\n", encoding="cp850")
    line = {"id": "duty", "text": "Duty changes on Monday."}
    (folder / "data.jsonl").write_text(json.dumps(line) + "\n")
    question = {"question": "Where does billing run?"}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
