"""Keeps other requests from sharing vLLM's blocks whose KV is not exact.

vLLM finds blocks by a hash of all tokens up to their end, but a blend has other KV for the same
tokens. So a request that blends gets hashes of its own, from its first block that is not exact on.
It still shares the blocks before. vLLM's own ``cache_salt`` would make all of the request's blocks
its own, and the client would have to send it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

_SALTED_FROM = "_ragcache_salted_from"


def salt_block_hashes(request: Any, first_block: int) -> None:
    """Make a request's block hashes unique from ``first_block`` on, present and future ones.

    A second call for the same block or a later one changes nothing.

    Args:
        request: vLLM's ``Request``.
        first_block: Index of the first block that is not exact.
    """
    salted_from = getattr(request, _SALTED_FROM, None)
    if salted_from is not None and salted_from <= first_block:
        return
    secret = secrets.token_bytes(16)

    def salted(block_hash: bytes) -> Any:
        mixed = hashlib.blake2b(block_hash, key=secret, digest_size=len(block_hash)).digest()
        return type(block_hash)(mixed)

    hashes = request.block_hashes
    hashes[first_block:] = [salted(block_hash) for block_hash in hashes[first_block:]]
    hasher = request._block_hasher
    if hasher is not None:
        # Each hash includes the one before it, so one salted hash salts all that follow. But the
        # first block may not be full yet.
        def hash_new_blocks(request: Any) -> list[Any]:
            start = len(request.block_hashes)
            return [
                salted(block_hash) if index >= first_block else block_hash
                for index, block_hash in enumerate(hasher(request), start)
            ]

        request._block_hasher = hash_new_blocks
    setattr(request, _SALTED_FROM, first_block)
