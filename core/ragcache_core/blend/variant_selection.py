"""Select the stored variant that each chunk of a prompt is loaded from.

A chunk takes the variant with the lowest CCI * (1 - beta'). A variant that was computed in full
after exactly this prefix has beta' 1, so it comes first. That holds even where the prefix is now a
blend, because a full computation would have produced this variant.

Source: Cache-Craft section 3.3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ragcache_core.blend.fix_overhead import HIGHEST_CCI, LOWEST_CCI, VariantFit, best_variant
from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_overlap import PrefixChunk, estimated_overlap, prefix_overlap
from ragcache_core.blend.token_selection import InfluencedChunk, share_to_tokens, wanted_tokens
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import VariantInfo
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import StoredVariant

ALPHA = 3.0
"""Default recomputation factor (eq. 12) of a plan without a calibrated one.

It is the highest value that the paper tries, and the one with the best quality (section 6). With
it only a chunk whose prefix is mostly unchanged asks for less than the recompute share allows.
"""

UNKNOWN_CCI = HIGHEST_CCI
"""CCI of a variant without an observation: it may depend on its prefix as much as any other."""


@dataclass(frozen=True, slots=True)
class VariantCandidate:
    """A stored variant of a chunk, with its observation if there is one."""

    key: VariantKey
    info: VariantInfo
    observation: ChunkObservation | None = None

    def __post_init__(self) -> None:
        if self.observation and len(self.observation.influence) != self.info.num_tokens:
            raise ValueError("an observation has one influence for each token of its variant")


@dataclass(frozen=True, slots=True)
class BlendSource:
    """The source of the KV of prompt tokens [start, end).

    Attributes:
        variant: None where no variant is stored; then the engine computes all the tokens.
        base_position: Position of the first token when the variant was computed.
        influence: Per token, scaled by the share of the prefix that has changed. None where no
            token needs recomputation.
        recompute_tokens: Number of tokens that its CFO (eq. 12) asks for, before the blend's limit.
        mismatch: CCI * (1 - beta'), the CFO of section 3.3.
    """

    variant: VariantKey | None
    start: int
    end: int
    base_position: int
    influence: tuple[float, ...] | None = None
    recompute_tokens: int = 0
    mismatch: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the source."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Blend:
    """The sources of a prompt, from its start on.

    Attributes:
        sources: Contiguous from position 0.
        exact_end: KV at positions below it is exact.
        recompute_share: Maximum share of the tokens from other prefixes that may be recomputed, in
            [0, 1].
        not_stored: Start positions of the chunks that may blend and have no stored variant,
            including those after the last source.
    """

    sources: tuple[BlendSource, ...]
    exact_end: int
    recompute_share: float
    not_stored: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.recompute_share <= 1:
            raise ValueError(f"recompute_share lies in [0, 1], not {self.recompute_share}")

    @property
    def recompute_tokens(self) -> int:
        """Number of loaded tokens to recompute."""
        from_other_prefixes = sum(
            source.num_tokens for source in self.sources if source.influence is not None
        )
        return min(
            sum(source.recompute_tokens for source in self.sources),
            share_to_tokens(self.recompute_share, from_other_prefixes),
        )

    @property
    def end(self) -> int:
        """Position after the last source."""
        return self.sources[-1].end if self.sources else 0

    @property
    def approximate(self) -> bool:
        """Whether any source is not exact."""
        return self.end > self.exact_end

    def influenced_chunks(self, end: int) -> tuple[InfluencedChunk, ...]:
        """Return the chunks before position end that may need recomputation."""
        return tuple(
            InfluencedChunk(source.start, source.influence[: end - source.start])
            for source in self.sources
            if source.influence is not None and source.start < end
        )

    def with_recomputed(self, starts: Collection[int]) -> Blend:
        """Return a blend that computes the sources at these start positions.

        Sources to compute at the end of the blend are removed.

        Args:
            starts: Start positions of blended sources. None of them is exact.
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

    def missing_ranges(
        self, first: int, end: int, *, not_stored_only: bool = False
    ) -> tuple[range, ...]:
        """Return the positions in [first, end) that no variant is loaded for.

        Args:
            first: First position.
            end: Position after the last one.
            not_stored_only: Leave out the chunks that are stored but not loaded.
        """
        return tuple(
            range(max(first, source.start), min(end, source.end))
            for source in self.sources
            if source.variant is None and max(first, source.start) < min(end, source.end)
            if not not_stored_only or source.start in self.not_stored
        )


def most_promising(
    stored: Sequence[StoredVariant], segments: Sequence[NamedSegment], index: int, limit: int
) -> Sequence[StoredVariant]:
    """Return at most limit variants, those with the lowest estimate of CCI * (1 - beta').

    Both need an observation, and a chunk that is asked for often has many variants. The chunks
    before each variant are known without it, and give an estimate of beta'. A variant that was
    computed first in a prompt has the lowest CCI. The others are taken to have the highest.

    The exact variant comes first, because it needs no recomputation. Among equal estimates the
    variants that load faster come first, then those with the lower key.

    Args:
        stored: The variants of one segment's chunk, with their prefix chunks, in any order.
        segments: The segments of the prompt.
        index: Index of the segment.
        limit: Number of variants.
    """
    if len(stored) <= limit:
        return stored
    before = segments[:index]
    prefix = [
        PrefixChunk(one.segment.chunk, one.segment.end - one.segment.start)
        for one in before
        if one.segment.action is Action.BLEND
    ]
    template = {one.segment.chunk for one in before if one.segment.action is not Action.BLEND}
    exact = segments[index].variant

    def rank(one: StoredVariant) -> tuple[bool, float, float, bytes]:
        old = [chunk for chunk in one.prefix_chunks if chunk not in template]
        cci = HIGHEST_CCI if old else LOWEST_CCI
        mismatch = cci * (1.0 - estimated_overlap(old, prefix))
        return one.key != exact, mismatch, one.load_s, one.key.to_bytes()

    return sorted(stored, key=rank)[:limit]


def select_variants(
    segments: Sequence[NamedSegment],
    num_exact: int,
    candidates: Mapping[int, Sequence[VariantCandidate]],
    recompute_share: float,
    alpha: float = ALPHA,
) -> Blend:
    """Select a source for each segment of a prompt.

    The blend ends with the last segment that has a stored variant. The engine computes what is not
    stored before that. This includes segments that have to be exact, such as the part of a template
    that differs from request to request: the chunks after it are reused all the same.

    Args:
        segments: Segments of a verified plan.
        num_exact: Number of leading segments that are stored as exact variants
            (``segments.longest_exact_chain``).
        candidates: Stored variants of the other segments, by index of the segment.
        recompute_share: Maximum share of the tokens from other prefixes that may be recomputed, in
            [0, 1].
        alpha: Recomputation factor (eq. 12).
    """
    sources: list[BlendSource] = []
    not_stored: set[int] = set()
    num_sources = 0  # up to the last one with a stored variant
    prefix: list[PrefixChunk] = []
    for index, named in enumerate(segments):
        segment = named.segment
        length = segment.end - segment.start
        if index < num_exact:
            sources.append(BlendSource(named.variant, segment.start, segment.end, segment.start))
            num_sources = len(sources)
        elif segment.action is Action.BLEND:
            source = _best_source(named, prefix, candidates.get(index, ()), alpha)
            sources.append(source)
            if source.variant is not None:
                num_sources = len(sources)
            else:
                not_stored.add(segment.start)
        else:
            sources.append(BlendSource(None, segment.start, segment.end, segment.start))
        if segment.action is Action.BLEND:
            prefix.append(PrefixChunk(segment.chunk, length))
    exact_end = segments[num_exact - 1].segment.end if num_exact else 0
    known = _with_default_influence(sources[:num_sources])
    return Blend(known, exact_end, recompute_share, frozenset(not_stored))


def handed_off_blend(pieces: Sequence[NamedSegment]) -> Blend:
    """Return a blend that another engine has computed: nothing of it is recomputed.

    Args:
        pieces: The prompt in pieces. None of them counts as exact.
    """
    sources = tuple(
        BlendSource(one.variant, one.segment.start, one.segment.end, one.segment.start)
        for one in pieces
    )
    return Blend(sources, 0, 0.0)


def _best_source(
    named: NamedSegment,
    prefix: Sequence[PrefixChunk],
    candidates: Sequence[VariantCandidate],
    alpha: float,
) -> BlendSource:
    start, end = named.segment.start, named.segment.end
    fitting = {c.key: c for c in candidates if c.info.num_tokens == end - start}
    fit = best_variant(_fit(candidate, named, prefix) for candidate in fitting.values())
    if fit is None:
        return BlendSource(None, start, end, start)
    best = fitting[fit.key]
    influence: tuple[float, ...] | None = None
    if fit.mismatch > 0:
        observation, changed = best.observation, 1.0 - fit.adjusted_overlap
        # A variant that was computed first in a prompt has attended to no other chunk, so its
        # influence is not known.
        influence = (
            tuple(changed * i for i in observation.influence)
            if observation and observation.attended
            else ()
        )
    recompute_tokens = wanted_tokens(fit.fix_overhead(alpha), end - start)
    base = best.info.base_position
    return BlendSource(best.key, start, end, base, influence, recompute_tokens, fit.mismatch)


def _fit(
    candidate: VariantCandidate, named: NamedSegment, prefix: Sequence[PrefixChunk]
) -> VariantFit:
    observation = candidate.observation
    if candidate.key == named.variant and candidate.info.provenance.exact:
        overlap = 1.0  # text between chunks included
    else:
        overlap = prefix_overlap(observation.attended, prefix).adjusted if observation else 0.0
    return VariantFit(candidate.key, observation.cci if observation else UNKNOWN_CCI, overlap)


def _with_default_influence(sources: Sequence[BlendSource]) -> tuple[BlendSource, ...]:
    """Give sources of unknown influence the mean influence of the others."""
    known = [i for source in sources for i in source.influence or ()]
    default = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    return tuple(
        replace(s, influence=(default,) * s.num_tokens)
        if s.influence is not None and len(s.influence) != s.num_tokens
        else s
        for s in sources
    )
