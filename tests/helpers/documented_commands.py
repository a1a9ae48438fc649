"""The commands of the documentation, and how a test runs each ``ragcache`` command among them."""

from __future__ import annotations

import enum
import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Final

from tests.helpers.document_files import pdf
from tests.helpers.documentation import ROOT, Block, Command, blocks, commands, tracked

PAGES: Final = tracked(
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md", "charts/**/README.md"
)
_INLINE: Final = ("ragcache ", "kubectl ragcache ", "make ", "python -m bench.", "python -m tools.")
"""How code inside a sentence begins that is a command as a whole."""

_ALONE: Final = {"completion", "doctor", "keys", "render", "size"}
"""Commands that need neither a platform nor a network."""
_WITH_GATEWAY: Final = {
    *("ask", "backup", "collection", "explain", "ingest", "restore", "top"),
}
_ELSEWHERE: Final = {
    "up": "tests/integration/cli/test_up.py",
    "down": "tests/integration/cli/test_up.py",
    "status": "tests/integration/cli/test_platform.py",
    "logs": "tests/integration/cli/test_platform.py",
    "sync": "tests/integration/cli/test_sync.py",
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
    for name in ("b.pdf", "report.pdf"):
        (folder / name).write_bytes(pdf(["Backups run at night."], title="Report"))
    line = {"id": "duty", "text": "Duty changes on Monday."}
    (folder / "data.jsonl").write_text(json.dumps(line) + "\n")
    question = {"question": "Where does billing run?"}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
