"""The embedded indexes of all generations, each in a folder of its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.segmented_index import IndexOptions, IndexThreads, SegmentedIndex


class SegmentedIndexes:
    """Opens and removes the indexes below one folder. See VectorIndexes.

    Args:
        folder: None: keep all indexes in memory.
        options: Of all indexes. Each has its own kind.
    """

    def __init__(
        self, folder: Path | None, threads: IndexThreads, options: IndexOptions | None = None
    ) -> None:
        self._folder = folder
        self._threads = threads
        self._options = options or IndexOptions()

    def open(self, generation: int, dimension: int, kind: IndexKind) -> SegmentedIndex:
        """Open the index of a generation, or an empty one."""
        folder = None if self._folder is None else self._folder / str(generation)
        options = replace(self._options, kind=kind)
        return SegmentedIndex.open(folder, dimension, options, self._threads)

    def remove(self, generation: int) -> None:
        """Remove the files of a generation, whose index is closed."""
        if self._folder is not None:
            shutil.rmtree(self._folder / str(generation), ignore_errors=True)

    def stored_generations(self) -> list[int]:
        """Return the generations that have files."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [int(one.name) for one in self._folder.iterdir() if one.name.isdecimal()]
