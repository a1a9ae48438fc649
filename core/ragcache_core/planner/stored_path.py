"""What is stored of a prompt in one order of its documents, summed up for fast decisions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode
from ragcache_core.planner.request_plan import PlannedPrompt, PlanPolicy

STORE = "store:"
"""The names of cache stores in the tree begin with it."""

DEVICE, HOST, MEMORY, DISK = "device", "host", "memory", "disk"
_MAX_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A copy of a variant in a cache store."""

    source: str
    tier: str
    num_bytes: int


class StoredPath:
    """The stored nodes of a prompt, in prompt order.

    Args:
        order: Rank of the document at each position.
        stale: Sources whose copies do not count.

    Attributes:
        chunks: Keys of the head's segments and of all chunks.
        num_head: How many of them belong to the head.
        ends: Tokens before each index, and of all chunks at the end.
        nodes: Nodes of the first chunks, as far as the tree has them.
        copies: The best exact copy of each node in a cache store; None: there is none.
        variants: The best copy of each chunk after any prefix; None: there is none. Empty unless
            the policy is to blend.
        token_bytes: Bytes of one token's KV.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        prompt: PlannedPrompt,
        order: Sequence[int],
        policy: PlanPolicy,
        stale: Collection[str] = (),
    ) -> None:
        chunks: list[ChunkKey] = [*prompt.head]
        num_tokens = [*prompt.head_tokens]
        for rank in order:
            chunks += prompt.documents[rank].chunks
            num_tokens += prompt.documents[rank].num_tokens
        self._stale = stale
        self.chunks = chunks
        self.num_head = num_head = len(prompt.head)
        self.ends = [0, *accumulate(num_tokens)]
        self.token_bytes = token_bytes = policy.token_bytes
        self.nodes = list(tree.walk(chunks))
        self.copies = [_store_copy(node, token_bytes, stale, exact=True) for node in self.nodes]
        # Bytes of the copies before each index, by tier.
        self._memory = [0]
        self._disk = [0]
        for copy in self.copies:
            in_memory = copy is not None and copy.tier == MEMORY
            num_bytes = copy.num_bytes if copy is not None else 0
            self._memory.append(self._memory[-1] + (num_bytes if in_memory else 0))
            self._disk.append(self._disk[-1] + (0 if in_memory else num_bytes))
        # By index, where the copies from there on end, and where those in memory end.
        count = len(self.copies)
        self._gaps = [count] * (count + 1)
        self._memory_ends = [count] * (count + 1)
        for index in range(count - 1, -1, -1):
            copy = self.copies[index]
            self._gaps[index] = index if copy is None else self._gaps[index + 1]
            in_memory = copy is not None and copy.tier == MEMORY
            self._memory_ends[index] = self._memory_ends[index + 1] if in_memory else index
        self._hosts = {
            source
            for node in self.nodes
            for source, residency in node.residency.items()
            if residency.tier == HOST and source not in stale
        }
        self.variants: list[StoredCopy | None] = []
        if policy.reuse == "blend":
            self.variants = [
                _best_variant(tree, chunk, token_bytes, stale) if i >= num_head else None
                for i, chunk in enumerate(chunks)
            ]

    def cached_chunks(self, source: str) -> int:
        """Return how many leading chunks an engine has in its prefix cache."""
        if source in self._stale:
            return 0
        count = 0
        for node in self.nodes:
            residency = node.residency.get(source)
            if residency is None or residency.tier != DEVICE or not residency.exact:
                break
            count += 1
        return count

    def loads(self, source: str, first: int) -> list[tuple[int, dict[str, int]]]:
        """Return how far an engine may load without a gap, and the bytes of each tier.

        Several ends are returned where slower tiers begin, so that they can be left out.

        Args:
            source: The engine.
            first: Index of the first chunk that it does not have.

        Returns:
            Index of the first chunk after the load, and bytes by tier; ascending.
        """
        if source in self._hosts:
            return self._loads_with_host(source, first)
        if first >= len(self.nodes):
            return []
        end, memory_end = self._gaps[first], self._memory_ends[first]
        found = []
        memory, disk = self._memory, self._disk
        if first < memory_end < end:
            found.append((memory_end, {MEMORY: memory[memory_end] - memory[first]}))
        if end > first:
            sizes = {MEMORY: memory[end] - memory[first], DISK: disk[end] - disk[first]}
            found.append((end, sizes))
        return found

    def exact_copy(self, source: str, index: int) -> StoredCopy | None:
        """Return the copy of a chunk that an engine would load."""
        node = self.nodes[index]
        residency = node.residency.get(source)
        is_host = residency is not None and residency.exact and residency.tier == HOST
        if is_host and source not in self._stale:
            return StoredCopy(source, HOST, node.num_bytes or self._bytes_of(index))
        return self.copies[index]

    def _loads_with_host(self, source: str, first: int) -> list[tuple[int, dict[str, int]]]:
        sizes: dict[str, int] = {}
        found: list[tuple[int, dict[str, int]]] = []
        end = first
        while end < len(self.nodes):
            copy = self.exact_copy(source, end)
            if copy is None:
                break
            if sizes and copy.tier not in sizes:
                found.append((end, dict(sizes)))
            sizes[copy.tier] = sizes.get(copy.tier, 0) + copy.num_bytes
            end += 1
        return [*found, (end, sizes)] if sizes else []

    def _bytes_of(self, index: int) -> int:
        return round(self.token_bytes * (self.ends[index + 1] - self.ends[index]))


def is_on_disk_only(tree: KnowledgeTree, chunk: ChunkKey, stale: Collection[str] = ()) -> bool:
    """Return whether a cache store has a variant of a chunk on a disk, and none in memory.

    Args:
        stale: Sources whose copies do not count.
    """
    variants = tree.variants_of(chunk, _MAX_VARIANTS)
    copies = [_store_copy(node, 0.0, stale, exact=False) for node in variants]
    return any(copy is not None and copy.tier == DISK for copy in copies)


def _store_copy(
    node: TreeNode, token_bytes: float, stale: Collection[str], *, exact: bool
) -> StoredCopy | None:
    """Return a node's copy in a cache store, in memory if there is one."""
    found: StoredCopy | None = None
    for source, residency in node.residency.items():
        if not source.startswith(STORE) or source in stale or (exact and not residency.exact):
            continue
        if found is None or residency.tier == MEMORY:
            num_bytes = node.num_bytes or round(token_bytes * node.num_tokens)
            found = StoredCopy(source, residency.tier, num_bytes)
    return found


def _best_variant(
    tree: KnowledgeTree, chunk: ChunkKey, token_bytes: float, stale: Collection[str]
) -> StoredCopy | None:
    best: StoredCopy | None = None
    for node in tree.variants_of(chunk, _MAX_VARIANTS):
        copy = _store_copy(node, token_bytes, stale, exact=False)
        if copy is not None and (best is None or copy.tier == MEMORY):
            best = copy
            if copy.tier == MEMORY:
                break
    return best
