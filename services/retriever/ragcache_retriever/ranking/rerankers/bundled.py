"""The bundled ranker: a few small trees over features of the legs and the texts."""

from __future__ import annotations

from importlib.resources import files

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.boosted_trees import BoostedTrees, trees_from_text
from ragcache_core.retrieval.fusion import Scores
from ragcache_core.retrieval.rank_features import FEATURE_NAMES, rank_features
from ragcache_retriever.ranking.rerankers.reranker import RerankRequest

FILE_NAME = "bundled_trees.json"
FUSED_SCALE = 8.0
"""Weight of the fused score against the trees, which were trained to correct it."""


class BundledRanker:
    """Reranks in about two milliseconds. ``tools/train_ranker.py`` has trained it."""

    def __init__(self, trees: BoostedTrees) -> None:
        if trees.feature_names != FEATURE_NAMES:
            raise InvalidInput(
                FILE_NAME,
                "compares other features than there are",
                "train it again with tools/train_ranker.py",
            )
        self._trees = trees

    @classmethod
    def load(cls) -> BundledRanker:
        """Return the ranker that comes with the package."""
        text = (files("ragcache_retriever.ranking.rerankers") / FILE_NAME).read_text("utf-8")
        return cls(trees_from_text(text))

    @property
    def name(self) -> str:
        """See Reranker."""
        return "bundled"

    @property
    def is_fast(self) -> bool:
        """See Reranker."""
        return True

    @property
    def needs_choice(self) -> bool:
        """See Reranker."""
        return True

    def scores(self, request: RerankRequest) -> Scores:
        """See Reranker. A score of 1 is about that of a text with all a question asks for."""
        features = rank_features(
            request.words, request.candidates, request.fused, request.texts, request.vectors
        )
        corrections = self._trees.scores(features)
        total: Scores = request.fused + corrections / FUSED_SCALE
        return total

    def close(self) -> None:
        """Do nothing: there are no connections."""
