"""The gain that token counts alone allow a sequence, with caches that never evict.

Plain vLLM computes what follows the longest prefix that an earlier request had. Chunk reuse also
computes the recompute share of each passage that an earlier request had anywhere. Loading and all
else cost nothing. The cap is the quotient of both counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.support.sequences.prompts import Part, SequenceRequest


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of the measured requests that each kind of reuse computes."""

    prompt: int
    plain: float
    exact: float
    blend: float

    @property
    def blend_cap(self) -> float:
        return self.plain / self.blend

    @property
    def exact_cap(self) -> float:
        return self.plain / self.exact


class PrefixTree:
    """Prompts as chains of part names."""

    def __init__(self) -> None:
        self._children: dict[str, PrefixTree] = {}

    def insert(self, names: Iterable[str]) -> int:
        """Add a chain, and return how many of its first parts an earlier chain had."""
        node, known = self, 0
        for name in names:
            child = node._children.get(name)
            if child is None:
                child = node._children[name] = PrefixTree()
            else:
                known += 1  # a new child has no children, so known parts are the first ones
            node = child
        return known


def computed_tokens(
    requests: Sequence[SequenceRequest],
    measured_from: int,
    recompute_share: float,
    ahead: Sequence[SequenceRequest] = (),
) -> ComputedTokens:
    """Count the tokens that each kind of reuse computes of a sequence.

    Every prompt's last token is computed, because it generates the first token of the answer.

    Args:
        requests: The sequence.
        measured_from: Index of the first request that counts. Those before it fill the caches.
        recompute_share: Share of a known passage that ``blend`` computes.
        ahead: Prompts that were computed before the sequence, without plain vLLM.
    """
    plain_tree, exact_tree = PrefixTree(), PrefixTree()
    seen: set[str] = set()
    for prompt in ahead:
        exact_tree.insert(part.name for part in prompt.parts)
        seen.update(part.name for part in prompt.passages)
    total = 0
    plain = exact = blend = 0.0
    for index, request in enumerate(requests):
        names = [part.name for part in request.parts]
        plain_known, exact_known = plain_tree.insert(names), exact_tree.insert(names)
        if index >= measured_from:
            total += request.num_tokens
            plain += max(1.0, _tokens_from(request, plain_known))
            exact += max(1.0, _tokens_from(request, exact_known))
            known = {name for name in names[exact_known:] if name in seen}
            saved = sum(
                len(part.token_ids) * (1 - recompute_share)
                for part in request.parts[exact_known:]
                if part.part is Part.PASSAGE and part.name in known
            )
            blend += max(1.0, _tokens_from(request, exact_known) - saved)
        seen.update(part.name for part in request.passages)
    return ComputedTokens(total, plain, exact, blend)


def useful_warm_up(requests: Sequence[SequenceRequest], measured_from: int) -> list[int]:
    """Return the warm-up requests that give the measured ones their longest known prefixes.

    A cache that serves prefixes only, and evicts none of them, is then as warm as after all
    warm-up requests. The last request with a prefix counts.
    """
    last: dict[tuple[str, ...], int] = {}
    for index, request in enumerate(requests[:measured_from]):
        chain: tuple[str, ...] = ()
        for part in request.parts:
            chain = (*chain, part.name)
            last[chain] = index
    useful: set[int] = set()
    for request in requests[measured_from:]:
        chain, best = (), None
        for part in request.parts:
            chain = (*chain, part.name)
            best = last.get(chain, best)
        if best is not None:
            useful.add(best)
    return sorted(useful)


def _tokens_from(request: SequenceRequest, first: int) -> int:
    return sum(len(part.token_ids) for part in request.parts[first:])
