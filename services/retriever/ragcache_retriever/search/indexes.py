"""The vector indexes of a retriever, one for each generation of a collection's chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.files.base_files import remove_base
from ragcache_retriever.search.scan_pool import IndexThreads
from ragcache_retriever.search.segmented_index import IndexOptions, SegmentedIndex


class SegmentedIndexes:
    """Opens and removes indexes, see VectorIndexes.

    Args:
        folder: Has a folder for each generation. None: keep everything in memory.
        options: Of each index, besides its kind.
    """

    def __init__(self, folder: Path | None, options: IndexOptions, threads: IndexThreads) -> None:
        self._folder = folder
        self._options = options
        self._threads = threads

    def open(self, generation: int, dimension: int, kind: IndexKind) -> SegmentedIndex:
        """See VectorIndexes.open."""
        folder = None if self._folder is None else self._folder / str(generation)
        options = replace(self._options, kind=kind)
        return SegmentedIndex.open(folder, dimension, options, self._threads)

    def remove(self, generation: int) -> None:
        """See VectorIndexes.remove."""
        if self._folder is not None:
            remove_base(self._folder / str(generation))

    def stored_generations(self) -> list[int]:
        """See VectorIndexes.stored_generations."""
        if self._folder is None or not self._folder.exists():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
