"""A prompt cut by its length alone, where no plan says how: into pieces from its start on, or from
where a plan's segments end.

Their names depend on tokens, as those of chunks do, so whoever sends the same beginning finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES, KVSpace, PrefixHasher, VariantKey, chunk_key
from ragcache_core.plan.reuse_plan import MAX_SEGMENTS, PLAIN_DOMAIN, Segment
from ragcache_core.plan.segments import NamedSegment

PIECE_TOKENS = 256
"""Tokens of a piece. On average half of one is computed where two prompts part, and each is a
value with an entry, a place and a checksum for each layer: 256 tokens are 128 computed again, a
quick pass, and one alone is four times what an engine loads at least (``min_load_tokens``). A layer
of it has 1 MiB with 8 heads of 128. A multiple of vLLM's block sizes, so that pieces share none."""


def plain_domain(cache_salt: str | None) -> str:
    """Access domain of clients that send no plan: of all with the same salt, and of nobody else.

    cache_salt: what keeps their blocks apart in vLLM's own prefix cache; None: they share.
    No plan may name such a domain (``ReusePlan.from_json``).
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
    """The whole pieces of a prompt, from its start on, each named by what it is and stands behind.

    What is left at the end is of no piece, nor is what lies beyond MAX_SEGMENTS of them.
    """
    whole = len(token_ids) // PIECE_TOKENS * PIECE_TOKENS
    return _cut(space, domain, token_ids, 0, whole)[:MAX_SEGMENTS]


def handoff_segments(
    space: KVSpace,
    domain: str,
    token_ids: Sequence[int],
    segments: tuple[NamedSegment, ...],
) -> tuple[NamedSegment, ...]:
    """A plan's segments, and pieces of all that lies behind them but a prompt's last token.

    segments: from the prompt's start on, without gaps. The last piece may be of any length. The
    last token's KV is never needed: whoever goes on computes that token for its output.
    """
    first = segments[-1].segment.end if segments else 0
    tail = _cut(space, domain, token_ids, first, len(token_ids) - 1)
    return (*segments, *tail)[:MAX_SEGMENTS]


def _cut(
    space: KVSpace, domain: str, token_ids: Sequence[int], first: int, last: int
) -> tuple[NamedSegment, ...]:
    """Pieces of tokens [first, last)."""
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
