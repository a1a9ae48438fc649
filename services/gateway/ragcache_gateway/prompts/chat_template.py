"""Chat templates whose control tokens are told apart from texts that spell control tokens.

A chat template makes one text of all messages. In that text, the token that ends a message looks
like the same characters in a message. So each control token that a message spells is
replaced before the template is rendered. Its stand-in is a word that no tokenizer knows; after
rendering it is the control token's text again, and tokenized as plain text. Messages that spell no
control token are rendered as they are.

Templates look for some control tokens in messages, such as those around reasoning, which they
remove from earlier turns. In these expressions the template gets the stand-ins, too.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment

from ragcache_kv.model.tokenizer import ChunkTokenizer

_COMPARISONS: Final = frozenset({"==", "!=", "in"})
_SEARCHES: Final = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix"}
    | {"removesuffix", "find", "rfind", "index", "rindex", "count"}
)
"""Methods of texts whose argument is looked for in a message. ``replace`` is none of them: what it
inserts would be taken for text of the message."""

_ROLE: Final = "role"
"""Field of a message that is never changed: requests are checked for its values."""


@dataclass(frozen=True, slots=True)
class ExaminedTemplate:
    """A chat template that looks for stand-ins where it looked for control tokens.

    Attributes:
        source: Its text.
        words: Names and texts in its expressions. Values of messages that are equal to one are
            compared with it, or are the name of a field.
    """

    source: str
    words: frozenset[str]


class TemplateRenderer:
    """Renders conversations so that ``pieces`` can tell their texts from the template.

    Args:
        tokens: Knows the control tokens of the model.
        render: Renders a template: gets its source, the messages and the further arguments.
    """

    def __init__(
        self,
        tokens: ChunkTokenizer,
        render: Callable[[str, list[dict[str, Any]], Mapping[str, Any]], str],
    ) -> None:
        self._controls = controls = tokens.control_texts
        self._is_disguised = tokens.is_disguised
        self._render = render
        # A word of letters and digits stays as it is in JSON and in all that templates do to texts.
        # Who knows it can write no more than stand-ins, which become plain text.
        self._mark = f"z{secrets.token_hex(8)}q"
        self._stand_in = re.compile(f"{self._mark}([0-9]+)z")
        self._boundary = self._stand_in_of(len(controls.texts))
        self._numbers = {text: number for number, text in enumerate(controls.texts)}
        self._texts = (*controls.texts, "")
        self._max_length = max(map(len, controls.texts), default=0)
        self._examined = functools.lru_cache(8)(self._examine)

    def render(
        self, source: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Render a conversation, with stand-ins for the control tokens that its texts spell.

        A control token may also be formed where a text meets the template or another text, such as
        of "<" in the template and "|end|>" in a message. If some control token of the rendered text
        depends on such a seam, the texts are rendered with boundaries at their ends.

        Args:
            source: The chat template.
            messages: As the template takes them.
            arguments: Further arguments of the template.

        Raises:
            Exception: What the template raises for messages that it does not expect.
        """
        given = (messages, dict(arguments))
        spelled = self._spelled(*given, None)
        template = source if spelled == given else self._examined(source).source
        text = self._render(template, *spelled)
        if not self._has_seam([*map(_without_role, messages), given[1]]):
            return text
        examined = self._examined(source)
        bounded = self._render(examined.source, *self._spelled(*given, examined.words))
        return text if self._found(text) == self._found(bounded) else bounded

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """Split a rendered text, or a part of it, at its stand-ins.

        Returns:
            Each piece that is not empty, and whether it is plain text in which no control token is
            to be recognized.
        """
        parts = self._stand_in.split(rendered)
        pieces = [
            (self._texts[int(part)], True) if i % 2 else (part, False)
            for i, part in enumerate(parts)
        ]
        return [piece for piece in pieces if piece[0]]

    def _found(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self._controls.spans(text)]

    def _stand_in_of(self, number: int) -> str:
        return f"{self._mark}{number}z"

    def _spelled(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        words: frozenset[str] | None,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Replace control tokens in all texts but the messages' own roles. See ``_protect``."""
        kept = [{name: one[name] for name in one if name == _ROLE} for one in messages]
        texts = self._protect([*map(_without_role, messages), arguments], words)
        return [{**role, **one} for role, one in zip(kept, texts, strict=False)], texts[-1]

    def _protect(self, value: Any, words: frozenset[str] | None) -> Any:
        """Replace control tokens in all texts of a value of JSON.

        Args:
            words: Texts that get no boundaries. None: no text gets any.
        """
        match value:
            case str():
                return self._protect_text(value, words)
            case list() | tuple():
                return [self._protect(one, words) for one in value]
            case Mapping():
                return {
                    self._protect_text(name, words) if isinstance(name, str) else name: (
                        self._protect(one, words)
                    )
                    for name, one in value.items()
                }
            case _:
                return value

    def _protect_text(self, text: str, words: frozenset[str] | None) -> str:
        parts = []
        at = 0
        for start, end in [*self._controls.spans(text), (len(text), len(text))]:
            part = text[at:start]
            if self._is_disguised(part):
                part = self._boundary.join(["", *part, ""])
            elif words is not None and text not in words:
                part = self._bounded(part)
            parts.append(part)
            parts += [self._stand_in_of(self._numbers[text[start:end]])] if start < end else []
            at = end
        return "".join(parts)

    def _bounded(self, text: str) -> str:
        """Put boundaries around a text if it may be a part of a control token.

        They are within the white space around it, which templates may remove.
        """
        kept = text.strip()
        if not self._may_join(kept):
            return text
        start = text.index(kept)
        end = start + len(kept)
        return f"{text[:start]}{self._boundary}{kept}{self._boundary}{text[end:]}"

    def _has_seam(self, value: Any) -> bool:
        match value:
            case str():
                spans = self._controls.spans(value)
                starts, ends = (0, *(end for _, end in spans)), (*(one for one, _ in spans), None)
                parts = (value[start:end] for start, end in zip(starts, ends, strict=True))
                return any(self._may_join(part.strip()) for part in parts)
            case list() | tuple():
                return any(map(self._has_seam, value))
            case Mapping():
                return any(
                    self._has_seam(name) or self._has_seam(one) for name, one in value.items()
                )
            case _:
                return False

    def _may_join(self, text: str) -> bool:
        """Whether a text with others around it may make a control token."""
        lengths = range(1, min(self._max_length, len(text) + 1))
        return (
            any(text[:length] in self._endings for length in lengths)
            or any(text[-length:] in self._beginnings for length in lengths)
            or (0 < len(text) < self._max_length and text in self._joined)
        )

    @functools.cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(one[:n] for one in self._controls.texts for n in range(1, len(one)))

    @functools.cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(one[n:] for one in self._controls.texts for n in range(1, len(one)))

    @functools.cached_property
    def _joined(self) -> str:
        return "\0".join(self._controls.texts)

    def _examine(self, source: str) -> ExaminedTemplate:
        """Make a template look for stand-ins where it looks for control tokens in a message."""
        # Environments that render it may trim more; this one must keep each character.
        tokens = list(Environment(keep_trailing_newline=True).lex(source))
        kept = [i for i, (_, kind, _) in enumerate(tokens) if kind != "whitespace"]
        values = [tokens[i][2] for i in kept]
        parts = [value for _, _, value in tokens]
        words = set()
        for n, i in enumerate(kept):
            _, kind, value = tokens[i]
            if kind == "name":
                words.add(value)
            elif kind == "string":
                words.add(value[1:-1])
                if _is_searched_for(values, n):
                    parts[i] = self._protect_text(value, None)
        return ExaminedTemplate("".join(parts), frozenset(words))


def _without_role(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in message.items() if name != _ROLE}


def _is_searched_for(values: list[str], n: int) -> bool:
    """Whether a template looks for the text at index n of the parts of its source."""
    before = ["", "", "", *values[:n]][-3:]
    after = [*values[n + 1 :], "", ""][:2]
    return (
        before[2] in _COMPARISONS
        or after[0] in _COMPARISONS
        or after == ["not", "in"]
        or (before[0] == "." and before[1] in _SEARCHES and before[2] == "(")
    )
