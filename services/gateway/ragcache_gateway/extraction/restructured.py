"""Reads reStructuredText with docutils. Directives and roles of Sphinx keep their text.

docutils opens no other file here: an included file is named in a warning.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from docutils import nodes
from docutils.core import publish_doctree
from docutils.parsers.rst import Directive, directives, roles

from ragcache_gateway.extraction.doctree import markdown_of
from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument, cleaned

_SETTINGS: Final = {
    "_disable_config": True,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "syntax_highlight": "none",
    "doctitle_xform": False,
    "docinfo_xform": False,
    # Errors stay in the tree, as they have the text that could not be read.
    "report_level": 3,
    "halt_level": 5,
    "line_length_limit": 1 << 20,
}
_CODE: Final = frozenset(
    {
        "code",
        "code-block",
        "sourcecode",
        "code-cell",
        "console",
        "highlight-code",
        "ipython",
        "ipython3",
        "parsed-code",
        "prompt",
        "raw",
        "testcode",
        "testoutput",
        "testsetup",
    }
)
_SILENT: Final = frozenset(
    {
        "contents",
        "currentmodule",
        "default-role",
        "default-domain",
        "highlight",
        "index",
        "meta",
        "sectnum",
        "tabularcolumns",
        "toctree",
    }
)
"""Directives whose text is not of the page: lists of other pages, and settings."""
_OTHER_FILES: Final = frozenset({"include", "literalinclude"})
_NAMES: Final = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "versionremoved": "Removed in version",
    "deprecated": "Deprecated since version",
    "seealso": "See also",
}
_TEXT_ROLES: Final = frozenset(
    {
        "abbr",
        "any",
        "dfn",
        "doc",
        "download",
        "guilabel",
        "index",
        "menuselection",
        "numref",
        "ref",
        "term",
    }
)
_TARGET = re.compile(r"\s*<[^<>]*>\s*$", re.DOTALL)


def read_restructured(content: bytes) -> ExtractedText:
    """Read a page. Raises UnreadableDocument."""
    text, warnings = decoded(content)
    missing: list[str] = []
    with _reading_all(missing):
        tree = publish_doctree(
            text, settings_overrides={**_SETTINGS, "warning_stream": io.StringIO()}
        )
    text = cleaned(markdown_of(tree))
    if not text:
        raise UnreadableDocument("has no text", "send a page with text")
    said = (f"the included file {name} was not read; ingest it too" for name in missing)
    return ExtractedText(text, markdown=True, warnings=(*warnings, *said))


@contextmanager
def _reading_all(missing: list[str]) -> Iterator[None]:
    """Have docutils read directives and roles that it does not know. Other threads must not run."""
    known = directives.directive, roles.role

    def directive(name: str, *arguments: Any) -> Any:
        plain = name.lower().rpartition(":")[2]
        if plain in _OTHER_FILES:
            return _other_file(missing), []
        if plain in _SILENT:
            return _Silent, []
        if plain in _CODE:
            return _Code, []
        found, messages = known[0](name, *arguments)
        return (found, messages) if found is not None else (_AnyDirective, [])

    def role(name: str, *arguments: Any) -> Any:
        found, messages = known[1](name, *arguments)
        return (found, messages) if found is not None else (_any_role, [])

    directives.directive, roles.role = directive, role
    try:
        yield
    finally:
        directives.directive, roles.role = known


class _AnyOption(dict[str, Callable[[str | None], str]]):
    """Takes every option of a directive as text."""

    def __missing__(self, name: str) -> Callable[[str | None], str]:
        return lambda value: value or ""


class _AnyDirective(Directive):  # type: ignore[misc]
    """A directive that docutils does not know: its argument in bold, and then its content."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = _AnyOption({"name": directives.unchanged})

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the argument and the content."""
        block = nodes.container()
        named = _NAMES.get(self.name.lower().rpartition(":")[2], "")
        argument = "".join(self.arguments)
        # Text may follow the version on the next lines.
        first, _, rest = argument.partition("\n") if named else (argument, "", "")
        title = " ".join([named, *first.split(), self.options.get("caption", "")]).strip()
        for text, kind in ((title, nodes.strong), (rest, nodes.inline)):
            if text:
                parsed, _ = self.state.inline_text(text, self.lineno)
                block += nodes.paragraph("", "", kind("", "", *parsed))
        self.state.nested_parse(self.content, self.content_offset, block)
        return [block]


class _Code(_AnyDirective):
    """Code. Its caption comes before it."""

    def run(self) -> list[nodes.Node]:
        """Return a literal block."""
        code = "\n".join(self.content)
        block = nodes.literal_block(code, code, classes=["code", *self.arguments[:1]])
        caption = self.options.get("caption", "")
        return [nodes.paragraph("", caption), block] if caption else [block]


class _Silent(_AnyDirective):
    """A directive without text of the page."""

    def run(self) -> list[nodes.Node]:
        """Return nothing."""
        return []


def _other_file(missing: list[str]) -> type[Directive]:
    class _OtherFile(_AnyDirective):
        """Another file, which is not read."""

        def run(self) -> list[nodes.Node]:
            """Note the file."""
            missing.extend(self.arguments)
            return []

    return _OtherFile


def _any_role(
    role: str, rawtext: str, text: str, *_: Any, **__: Any
) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Return the text of a role, without its target. Names of code become code."""
    shown = _TARGET.sub("", text) or text.strip("<> ")
    if role.rpartition(":")[2] in _TEXT_ROLES:
        return [nodes.inline(rawtext, shown)], []
    if shown.startswith("~"):
        shown = shown.rpartition(".")[2].removeprefix("~")
    return [nodes.literal(rawtext, shown.removeprefix("!"))], []
