"""Cuts prompts into pieces of a fixed length where no plan defines segments.

The pieces of a prompt without a plan start at its first token. Those for a handoff start where the
segments of the plan end. Their names depend on tokens, like those of chunks, so every request with
the same beginning finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES, KVSpace, PrefixHasher, VariantKey, chunk_key
from ragcache_core.plan.reuse_plan import MAX_SEGMENTS, PLAIN_DOMAIN, Segment
from ragcache_core.plan.segments import NamedSegment

PIECE_TOKENS = 256
"""Tokens of a piece.

On average half a piece is computed again where two prompts diverge, and each piece costs one stored
value with metadata and one checksum per layer. 256 tokens mean 128 recomputed ones on average,
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
