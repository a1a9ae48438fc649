"""Finds the part of a template that many prompts have in common.

Applications put a date, a user or a session into their system prompt. Without a split, each of
these is another segment, and the instructions before it are stored and looked up once for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from ragcache_core.identity.keys import PUBLIC_DOMAIN, common_tokens

MIN_TOKENS = 32
"""Least tokens by which a common prefix grows. Two names that begin alike add a token or two, and
are no reason for another split: a prefix is found in the store only if it ends where it ended
before."""

NUM_CHANGES = 3
"""Latest heads of a domain that each came once, after which a new head is expected to come once,
too: it has a time or a session."""

MAX_HEADS = 256
"""Number of heads and of prefixes that are remembered, most recently used."""

_Head = tuple[int, ...]
_Name = tuple[str, _Head]
"""An access domain, and a head of one of its prompts."""


class StablePrefixes:
    """Splits heads of prompts, by the heads of their domain before them.

    A domain's splits say nothing about the prompts of others. Not safe for several threads.
    """

    def __init__(self) -> None:
        self._splits: OrderedDict[_Name, int] = OrderedDict()
        self._prefixes: OrderedDict[_Name, int] = OrderedDict()
        self._repeated: OrderedDict[_Name, int] = OrderedDict()

    def split(
        self, head: Sequence[int], domain: str = PUBLIC_DOMAIN, *, is_early: bool = False
    ) -> int:
        """Return how many leading tokens of a head are a segment of their own.

        The same head is always split alike, while it is remembered.

        Args:
            head: Token ids of a prompt before its first chunk.
            domain: Access domain of the prompt.
            is_early: The same question will have its head split again, so this one does not count.

        Returns:
            The number of tokens, or the length of the head if it is one segment.
        """
        name = domain, tuple(head)
        length = self._splits.get(name)
        is_known = length is not None
        if length is None:
            length = self._find_split(name)
        if not is_early:
            if is_known:
                _remember(self._repeated, name, length)
            _remember(self._splits, name, length)
        return length

    def comes_once(self, head: Sequence[int], domain: str = PUBLIC_DOMAIN) -> bool:
        """Return whether a head that was just split is new, and so were the latest before it."""
        name = domain, tuple(head)
        others = (one for one in reversed(self._splits) if one[0] == domain and one != name)
        latest = [name, *islice(others, NUM_CHANGES)]
        return len(latest) > NUM_CHANGES and not any(one in self._repeated for one in latest)

    def _find_split(self, name: _Name) -> int:
        domain, head = name
        prefixes = (p for p in _heads_of(domain, self._prefixes) if head[: len(p)] == p)
        known = max(prefixes, key=len, default=())
        others = _heads_of(domain, self._splits)
        common = max((common_tokens(head, other) for other in others), default=0)
        if common >= len(known) + MIN_TOKENS:
            known = head[:common]
        if not known:
            return len(head)
        _remember(self._prefixes, (domain, known), len(known))
        return len(known)


def _heads_of(domain: str, memory: OrderedDict[_Name, int]) -> Iterator[_Head]:
    return (head for owner, head in memory if owner == domain)


def _remember(memory: OrderedDict[_Name, int], name: _Name, length: int) -> None:
    memory[name] = length
    memory.move_to_end(name)
    while len(memory) > MAX_HEADS:
        memory.popitem(last=False)
