"""Writes a document tree of docutils as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from docutils import nodes

from ragcache_gateway.extraction.notebook import fence
from ragcache_gateway.extraction.tables import markdown_table

_MAX_LEVEL: Final = 6
_INLINE: Final = {
    "emphasis": "*{}*",
    "strong": "**{}**",
    "literal": "`{}`",
    "math": "${}$",
    "footnote_reference": "[{}]",
    "citation_reference": "[{}]",
    "system_message": "",
    "target": "",
}


def markdown_of(tree: nodes.document) -> str:
    """Return the text of a document. Sections have headings."""
    return "\n\n".join(_blocks(tree, 0))


def _blocks(node: nodes.Element, level: int) -> Iterator[str]:
    """Yield the blocks of text of a node's children."""
    for child in node.children:
        if isinstance(child, nodes.Text | nodes.Inline):
            text = _inline(child).strip()
            blocks: Iterable[str] = [text] if text else []
        else:
            blocks = _block(child, level)
        yield from filter(None, blocks)


def _block(node: nodes.Node, level: int) -> Iterator[str]:
    """Return the blocks of a node.

    Args:
        level: Of the section that has the node; 0: none.
    """
    writer = next(writer for kinds, writer in _WRITERS if isinstance(node, kinds))
    return writer(node, level)


def _nothing(node: nodes.Node, level: int) -> Iterator[str]:
    return iter(())


def _section(node: nodes.Element, level: int) -> Iterator[str]:
    return _blocks(node, level + 1)


def _title(node: nodes.Element, level: int) -> Iterator[str]:
    is_heading = isinstance(node, nodes.title) and isinstance(node.parent, nodes.section)
    yield f"{'#' * min(level, _MAX_LEVEL)} {_line(node)}" if is_heading else f"**{_line(node)}**"


def _code(node: nodes.Element, level: int) -> Iterator[str]:
    yield fence(node.astext(), _language(node))


def _math(node: nodes.Element, level: int) -> Iterator[str]:
    yield f"$$\n{node.astext()}\n$$"


def _line_block(node: nodes.Element, level: int) -> Iterator[str]:
    yield "\n".join(_lines(node))


def _rule(node: nodes.Element, level: int) -> Iterator[str]:
    yield "---"


def _paragraph(node: nodes.Node, level: int) -> Iterator[str]:
    yield _inline(node).strip()


def _unread(node: nodes.Element, level: int) -> Iterator[str]:
    """Yield the text that docutils could not read, which its message has."""
    for block in node.findall(nodes.literal_block):
        yield block.astext()


def _quote(node: nodes.Element, level: int) -> Iterator[str]:
    yield textwrap.indent("\n\n".join(_blocks(node, level)), "> ", lambda _: True)


def _note(node: nodes.Element, level: int) -> Iterator[str]:
    label, first, *others = [*_blocks(node, level), "", ""]
    yield f"[{label}] {first}"
    yield from others


def _admonition(node: nodes.Element, level: int) -> Iterator[str]:
    first, *others = [*_blocks(node, level), ""]
    yield f"**{node.tagname.capitalize()}:** {first}"
    yield from others


def _language(node: nodes.Element) -> str:
    if isinstance(node, nodes.doctest_block):
        return "python"
    return next((str(name) for name in node["classes"] if name != "code"), "")


def _lines(node: nodes.Element) -> Iterator[str]:
    for child in node.children:
        if isinstance(child, nodes.line_block):
            yield from (f"  {line}" for line in _lines(child))
        else:
            yield _inline(child)


def _list(node: nodes.Element, level: int) -> Iterator[str]:
    yield "\n".join(_list_items(node, level))


def _list_items(node: nodes.Element, level: int) -> Iterator[str]:
    """Yield the items of a list, each with the lines below it indented."""
    number = int(node.get("start", 1))
    for item in node.children:
        if not isinstance(item, nodes.Element):
            continue
        mark, blocks = "- ", list(_blocks(item, level))
        match item:
            case nodes.definition_list_item() | nodes.field() | nodes.option_list_item():
                blocks = _named(item, level)
            case nodes.list_item() if isinstance(node, nodes.enumerated_list):
                mark = f"{number}. "
                number += 1
        text = "\n\n".join(blocks).replace("\n\n- ", "\n- ")
        yield mark + textwrap.indent(text, " " * len(mark)).lstrip()


def _named(item: nodes.Element, level: int) -> list[str]:
    """Return a name and what is said of it: of a term, a field or an option."""
    body = item.children[-1]
    names = [_line(child) for child in item.children[:-1]]
    assert isinstance(body, nodes.Element)
    first, *others = [*_blocks(body, level), ""]
    return [f"**{' '.join(names)}**: {first}", *filter(None, others)]


def _table(node: nodes.table, level: int) -> Iterator[str]:
    for title in node.findall(nodes.title):
        yield f"**{_line(title)}**"
    rows = [
        [text for entry in row.children for text in _entry(entry)]
        for row in node.findall(nodes.row)
    ]
    if rows:
        yield markdown_table(rows)


def _entry(entry: nodes.Node) -> list[str]:
    """Return the text of a cell, and that of the columns that it spans."""
    assert isinstance(entry, nodes.Element)
    text = " ".join(_blocks(entry, 0))
    return [text, *[""] * int(entry.get("morecols", 0))]


def _line(node: nodes.Node) -> str:
    return " ".join(_inline(node).split())


def _inline(node: nodes.Node) -> str:
    """Return the text of a node with marks of emphasis, code and links."""
    if isinstance(node, nodes.Text):
        return str(node.astext())
    separator = ", " if isinstance(node, nodes.option_group) else ""
    text = separator.join(map(_inline, node.children))
    match node:
        case nodes.image():
            text = node.get("alt", "")
        case nodes.option_argument():
            text = node.get("delimiter", " ") + text
        case nodes.reference() if "://" in (uri := node.get("refuri", "")) and uri != text:
            text = f"[{text}]({uri})"
    return _INLINE.get(node.tagname, "{}").format(text)


_Writer: TypeAlias = Callable[[Any, int], Iterator[str]]
_WRITERS: Final[tuple[tuple[Any, _Writer], ...]] = (
    (nodes.section, _section),
    ((nodes.title, nodes.subtitle, nodes.rubric), _title),
    ((nodes.literal_block, nodes.doctest_block), _code),
    (nodes.math_block, _math),
    (nodes.line_block, _line_block),
    (nodes.transition, _rule),
    (nodes.table, _table),
    (nodes.system_message, _unread),
    (nodes.block_quote, _quote),
    ((nodes.footnote, nodes.citation), _note),
    (nodes.admonition, _blocks),
    (nodes.Admonition, _admonition),
    ((nodes.definition_list, nodes.docinfo, nodes.field_list, nodes.option_list), _list),
    ((nodes.bullet_list, nodes.enumerated_list), _list),
    ((nodes.comment, nodes.decoration, nodes.meta, nodes.pending), _nothing),
    ((nodes.substitution_definition, nodes.target), _nothing),
    ((nodes.image, nodes.TextElement), _paragraph),
    (nodes.Element, _blocks),
)
"""The first kind that a node has tells its writer."""
