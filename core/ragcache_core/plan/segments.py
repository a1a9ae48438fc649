"""The segments of a prompt that stored variants may serve exactly.

A plan defines the segments. A prompt without one is cut into pieces of a fixed length, which start
at its first token. Those for a handoff start where the segments of the plan end. Their names depend
on tokens, like those of chunks, so every request with the same beginning finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES, KVSpace, PrefixHasher, VariantKey, chunk_key
from ragcache_core.identity.variant import VariantInfo
from ragcache_core.plan.reuse_plan import MAX_SEGMENTS, PLAIN_DOMAIN, Action, ReusePlan, Segment


@dataclass(frozen=True, slots=True)
class NamedSegment:
    """A segment of a plan with the key of the variant that would serve it exactly."""

    segment: Segment
    variant: VariantKey


def checked_segments(
    plan: ReusePlan, token_ids: Sequence[int], space: KVSpace
) -> tuple[NamedSegment, ...]:
    """Return the leading segments of a plan that are valid for this prompt.

    Stops at the first segment that leaves a gap, ends after the prompt, is to be computed, or whose
    tokens do not hash to its chunk. The engine computes everything from there on. This check makes
    a wrong or forged plan harmless.
    """
    named: list[NamedSegment] = []
    hasher = PrefixHasher(space, plan.domain)
    position = 0
    for segment in plan.segments:
        if segment.start != position or segment.end > len(token_ids):
            break
        tokens = token_ids[segment.start : segment.end]
        if segment.action is Action.COMPUTE:
            break
        if chunk_key(space, plan.domain, tokens) != segment.chunk:
            break
        named.append(NamedSegment(segment, VariantKey(segment.chunk, hasher.key())))
        hasher.extend(tokens)
        position = segment.end
    return tuple(named)


def longest_exact_chain(
    segments: Sequence[NamedSegment], stored: Mapping[VariantKey, VariantInfo]
) -> tuple[NamedSegment, ...]:
    """Return the leading segments whose variants serve this prompt exactly.

    Their variants are stored, exact, of the same length and at the same position.
    """
    chain: list[NamedSegment] = []
    for named in segments:
        info = stored.get(named.variant)
        length = named.segment.end - named.segment.start
        if info is None or not info.serves_exact:
            break
        if info.num_tokens != length or info.base_position != named.segment.start:
            break
        chain.append(named)
    return tuple(chain)


PIECE_TOKENS = 256
"""Tokens of a piece.

On average half a piece is computed again where two prompts diverge. Each piece costs one stored
value with metadata, and one checksum per layer. 256 tokens mean 128 recomputed ones on average,
which is a short pass. A piece is four times the least that an engine loads (``min_load_tokens``).
One layer of it has 1 MiB with 8 heads of 128 numbers. It is a multiple of vLLM's block sizes, so
pieces share no block.
"""


def plain_domain(cache_salt: str | None) -> str:
    """Return the access domain of clients that send no plan, shared by clients of equal salt.

    A plan may not name such a domain (``ReusePlan.decode``).

    Args:
        cache_salt: What separates the blocks of these clients in vLLM's prefix cache. None: shared
            by all clients without a salt.
    """
    if cache_salt is None:
        return PLAIN_DOMAIN
    digest = hashlib.blake2b(
        cache_salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES, person=b"ragcache-salt"
    )
    return PLAIN_DOMAIN + digest.hexdigest()


def prefix_pieces(
    space: KVSpace, domain: str, token_ids: Sequence[int]
) -> tuple[NamedSegment, ...]:
    """Return the full pieces of a prompt, from its start on.

    Tokens after the last full piece, and those beyond MAX_SEGMENTS pieces, are left out.
    """
    end = len(token_ids) // PIECE_TOKENS * PIECE_TOKENS
    return _cut(space, domain, token_ids, 0, end)[:MAX_SEGMENTS]


def handoff_segments(
    space: KVSpace,
    domain: str,
    token_ids: Sequence[int],
    segments: tuple[NamedSegment, ...],
) -> tuple[NamedSegment, ...]:
    """Return a plan's segments, followed by pieces of the rest of the prompt except its last token.

    The last piece may be shorter. The KV of the last token is never needed, because the engine that
    decodes computes that token for its output.

    Args:
        segments: Contiguous from the start of the prompt.
    """
    first = segments[-1].segment.end if segments else 0
    tail = _cut(space, domain, token_ids, first, len(token_ids) - 1)
    return (*segments, *tail)[:MAX_SEGMENTS]


def blended_pieces(plan: ReusePlan, num_tokens: int) -> tuple[NamedSegment, ...]:
    """Return the pieces under which an engine hands off a prompt that it has blended.

    They cover all tokens but the last. Their names depend on the request and not on tokens, so no
    other request finds them: the KV of a blend depends on all that the engine has chosen for it.
    Empty: the plan blends nothing.

    Args:
        num_tokens: Length of the prompt.
    """
    pieces = []
    for start in range(0, num_tokens - 1, PIECE_TOKENS) if plan.blends else ():
        end = min(start + PIECE_TOKENS, num_tokens - 1)
        name = f"{plan.domain}\0{plan.request}\0{start}".encode(errors="surrogatepass")
        chunk, prefix = (
            hashlib.blake2b(name, digest_size=KEY_BYTES, person=person).digest()
            for person in (b"ragcache-blend-c", b"ragcache-blend-p")
        )
        pieces.append(NamedSegment(Segment(chunk, start, end), VariantKey(chunk, prefix)))
    return tuple(pieces[:MAX_SEGMENTS])


def _cut(
    space: KVSpace, domain: str, token_ids: Sequence[int], first: int, last: int
) -> tuple[NamedSegment, ...]:
    """Cut tokens [first, last) into pieces."""
    ids = np.asarray(token_ids, dtype="<u4")
    hasher = PrefixHasher(space, domain)
    hasher.extend(ids[:first])
    pieces = []
    for start in range(first, last, PIECE_TOKENS):
        end = min(start + PIECE_TOKENS, last)
        tokens = ids[start:end]
        chunk = chunk_key(space, domain, tokens)
        pieces.append(NamedSegment(Segment(chunk, start, end), VariantKey(chunk, hasher.key())))
        hasher.extend(tokens)
    return tuple(pieces)
