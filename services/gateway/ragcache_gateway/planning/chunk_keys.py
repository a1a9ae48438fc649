"""The chunk keys of a prompt's parts."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from ragcache_core.identity.keys import ChunkKey, chunk_key_of_digest, token_digest
from ragcache_core.planner.document_order import RankedDocument
from ragcache_core.planner.request_plan import PlannedPrompt
from ragcache_gateway.prompts.builder import PromptParts
from ragcache_gateway.prompts.reuse_mode import ServedModel

MAX_KEYS = 65_536
"""Keys that are remembered. Each takes about 250 bytes."""


class ChunkKeys:
    """Computes chunk keys, and remembers those of the latest token digests. For one thread."""

    def __init__(self, model: ServedModel, max_keys: int = MAX_KEYS) -> None:
        self._model = model
        self._max_keys = max_keys
        self._keys: OrderedDict[tuple[str, bytes], ChunkKey] = OrderedDict()  # oldest use first

    def __len__(self) -> int:
        return len(self._keys)

    def planned_prompt(self, parts: PromptParts, domain: str) -> PlannedPrompt:
        """Return the keys and lengths of a prompt's parts in an access domain."""
        frame = parts.frame
        bounds = sorted({0, frame.stable_head, len(frame.head)})
        head = [frame.head[start:end] for start, end in pairwise(bounds)]
        documents = [
            RankedDocument(
                tuple(self.key(domain, chunk.digest) for chunk in chunks),
                tuple(len(chunk.ids) for chunk in chunks),
            )
            for chunks in parts.chunks
        ]
        return PlannedPrompt(
            head=tuple(self.key(domain, token_digest(ids)) for ids in head),
            head_tokens=tuple(map(len, head)),
            documents=documents,
            tail_tokens=len(frame.tail),
        )

    def key(self, domain: str, digest: bytes) -> ChunkKey:
        """Return the key of a chunk with this ``token_digest`` in an access domain."""
        name = (domain, digest)
        key = self._keys.get(name)
        if key is not None:
            self._keys.move_to_end(name)
            return key
        key = chunk_key_of_digest(self._model.space, domain, digest)
        self._keys[name] = key
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
        return key
