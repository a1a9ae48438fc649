"""Keep blocks that are not exact out of reach of other requests.

vLLM finds blocks again by the hash of all tokens up to their end. A blend has other KV for the same
tokens. So from the first block that is not exact on, a request that blends gets hashes that nobody
else has; the blocks before it stay shared. vLLM's own means, a ``cache_salt``, would make all of
the request's blocks its own, and a client would have to be trusted to send it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

_SALTED = "_ragcache_salted_from"


def salt(request: Any, first_block: int) -> None:
    """Make the hashes of a vLLM ``Request`` its own, from the hash of first_block on.

    Those that it has and those that it will have. Doing it again, from the same block or a later
    one, changes nothing.
    """
    done = getattr(request, _SALTED, None)
    if done is not None and done <= first_block:
        return
    secret = secrets.token_bytes(16)

    def salted(block_hash: bytes) -> Any:
        mixed = hashlib.blake2b(block_hash, key=secret, digest_size=len(block_hash)).digest()
        return type(block_hash)(mixed)

    hashes = request.block_hashes
    hashes[first_block:] = [salted(block_hash) for block_hash in hashes[first_block:]]
    hasher = request._block_hasher
    if hasher is not None:
        # Each hash is made of the one before it, so one that is salted salts all that follow; but
        # the block itself may not be full yet.
        def hash_more(of: Any) -> list[Any]:
            start = len(of.block_hashes)
            return [
                salted(block_hash) if start + number >= first_block else block_hash
                for number, block_hash in enumerate(hasher(of))
            ]

        request._block_hasher = hash_more
    setattr(request, _SALTED, first_block)
