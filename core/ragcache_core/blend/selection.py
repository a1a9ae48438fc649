"""Blending: which stored variant each chunk of a prompt comes from, and how much is mended.

Cache-Craft §3.3 takes the variant with the lowest CCI * (1 - beta'). One that was computed in full
behind just this prefix has beta' 1 and so comes first, also where what stands before it now is a
blend: it is what a full computation would have made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ragcache_core.blend.fix_overhead import VariantFit, best_variant
from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_chunks import PrefixChunk
from ragcache_core.blend.prefix_overlap import prefix_overlap
from ragcache_core.blend.token_ranking import InfluencedChunk
from ragcache_core.blend.token_selection import budget_tokens, wanted_tokens
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import VariantInfo
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import NamedSegment

ALPHA = 3.0
"""TokenSelection factor (eq. 12), where nobody has calibrated one: the highest of the paper's own
(§6), at which it found most quality. Only a chunk much of whose prefix is back wants less than the
budget then."""

UNKNOWN_CCI = 1.0
"""Of a variant that has not been observed: it may lean on its prefix as much as any."""


@dataclass(frozen=True, slots=True)
class VariantCandidate:
    """A variant of a chunk that is held, and what it was seen to take from its prefix, if known."""

    key: VariantKey
    info: VariantInfo
    observation: ChunkObservation | None = None

    def __post_init__(self) -> None:
        if self.observation and len(self.observation.influence) != self.info.num_tokens:
            raise ValueError("an observation has the tokens of its variant")


@dataclass(frozen=True, slots=True)
class BlendSource:
    """Where the KV of prompt tokens [start, end) comes from.

    variant: None where nothing is held and all of it is computed. base_position: of its first token
    when it was computed. influence: of each token, scaled by what of the prefix is not back; None
    where nothing is to mend. wanted: tokens to recompute by its CFO (eq. 12), if the budget allows.
    """

    variant: VariantKey | None
    start: int
    end: int
    base_position: int
    influence: tuple[float, ...] | None = None
    wanted: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Blend:
    """How a prompt is put together from its start on.

    sources: without gaps from position 0. exact_end: positions below it are exact. budget: share
    of the tokens from other prefixes that may be recomputed at most. unknown: where chunks start of
    which nothing is held, behind the last source, too.
    """

    sources: tuple[BlendSource, ...]
    exact_end: int
    budget: float
    unknown: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ValueError(f"a share lies in [0, 1], not {self.budget}")

    @property
    def wanted(self) -> int:
        """Tokens to recompute, beside those of which nothing is loaded."""
        mended = [source for source in self.sources if source.influence is not None]
        foreign = sum(source.num_tokens for source in mended)
        return min(sum(s.wanted for s in self.sources), budget_tokens(self.budget, foreign))

    @property
    def end(self) -> int:
        """Position after the last source."""
        return self.sources[-1].end if self.sources else 0

    @property
    def approximate(self) -> bool:
        """Whether any of it is not exact."""
        return self.end > self.exact_end

    def influenced(self, end: int) -> tuple[InfluencedChunk, ...]:
        """What there is of the chunks to mend before position end."""
        return tuple(
            InfluencedChunk(source.start, source.influence[: end - source.start])
            for source in self.sources
            if source.influence is not None and source.start < end
        )

    def without(self, starts: Collection[int]) -> Blend:
        """The same with the sources that start there computed; at the end they are left away.

        Those of what is exact, and of what may only be exact, are none of these.
        """
        sources = [
            BlendSource(None, source.start, source.end, source.start)
            if source.start in starts
            else source
            for source in self.sources
        ]
        while sources and sources[-1].variant is None:
            sources.pop()
        return replace(self, sources=tuple(sources))

    def holes(self, first: int, end: int, *, unknown: bool = False) -> tuple[range, ...]:
        """Positions in [first, end) of which nothing is loaded.

        unknown: only those of which nothing is held.
        """
        return tuple(
            range(max(first, source.start), min(end, source.end))
            for source in self.sources
            if source.variant is None and max(first, source.start) < min(end, source.end)
            if not unknown or source.start in self.unknown
        )


def blend(
    segments: Sequence[NamedSegment],
    exact: int,
    candidates: Mapping[int, Sequence[VariantCandidate]],
    budget: float,
    alpha: float = ALPHA,
) -> Blend:
    """Put a prompt together from what is held.

    segments: of a checked plan. exact: how many of them, from the first on, are held as exact
    (``reuse.longest_exact_chain``). candidates: what is held of the others, by place. budget: share
    of the tokens from other prefixes that may be recomputed at most; within it each chunk wants
    its CFO (eq. 12). It ends with the last segment of which something is held, and before a
    segment that may only be exact and is not.
    """
    sources: list[BlendSource] = []
    unknown: set[int] = set()
    whole = 0  # sources up to the last of which something is held
    before: list[PrefixChunk] = []
    for place, named in enumerate(segments):
        segment = named.segment
        length = segment.end - segment.start
        if place < exact:
            sources.append(BlendSource(named.variant, segment.start, segment.end, segment.start))
            whole = len(sources)
        elif segment.action is Action.BLEND:
            source = _source(named, before, candidates.get(place, ()), alpha)
            sources.append(source)
            if source.variant is not None:
                whole = len(sources)
            else:
                unknown.add(segment.start)
        else:
            break
        if segment.action is Action.BLEND:
            before.append(PrefixChunk(segment.chunk, length))
    exact_end = segments[exact - 1].segment.end if exact else 0
    return Blend(_comparable(sources[:whole]), exact_end, budget, frozenset(unknown))


def _source(
    named: NamedSegment,
    before: Sequence[PrefixChunk],
    candidates: Sequence[VariantCandidate],
    alpha: float,
) -> BlendSource:
    start, end = named.segment.start, named.segment.end
    fitting = {c.key: c for c in candidates if c.info.num_tokens == end - start}
    fit = best_variant(_fit(candidate, named, before) for candidate in fitting.values())
    if fit is None:
        return BlendSource(None, start, end, start)
    best = fitting[fit.key]
    influence: tuple[float, ...] | None = None
    if fit.mismatch > 0:
        seen, gone = best.observation, 1.0 - fit.adjusted_overlap
        # One that stood first has looked at no other chunk; what it would take is not known.
        influence = tuple(gone * i for i in seen.influence) if seen and seen.attended else ()
    wanted = wanted_tokens(fit.fix_overhead(alpha), end - start)
    return BlendSource(best.key, start, end, best.info.base_position, influence, wanted)


def _fit(
    candidate: VariantCandidate, named: NamedSegment, before: Sequence[PrefixChunk]
) -> VariantFit:
    seen = candidate.observation
    if candidate.key == named.variant and candidate.info.provenance.exact:
        overlap = 1.0  # text between chunks included
    else:
        overlap = prefix_overlap(seen.attended, before).adjusted if seen else 0.0
    return VariantFit(candidate.key, seen.cci if seen else UNKNOWN_CCI, overlap)


def _comparable(sources: Sequence[BlendSource]) -> tuple[BlendSource, ...]:
    """Sources of which no influence is known get that of the others on average."""
    known = [i for source in sources for i in source.influence or ()]
    usual = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    return tuple(
        replace(s, influence=(usual,) * s.num_tokens)
        if s.influence is not None and len(s.influence) != s.num_tokens
        else s
        for s in sources
    )
