"""A real language model that orders texts by how likely it finds the question after them.

It stands for a trained cross-encoder, which no Python package holds.

Source: Sachan et al., Improving Passage Retrieval with Zero-Shot Question Generation (EMNLP 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking.rerankers import MAX_READ, CandidateText

_TEXT_TOKENS = 200
"""Of a text that are read: an abstract says at its beginning what it is about."""


class LikelihoodReranker:
    """Reads as many candidates as a cross-encoder does. See Reranker.

    Args:
        model: Folder of the language model.
    """

    name = "likelihood"

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        """See Reranker."""
        asked = self._tokenizer(f"\nA claim about this: {question}").input_ids
        found = [self._score(asked, f"{one.heading}\n{one.text}") for one in texts[:MAX_READ]]
        behind = min(found) - np.arange(1.0, len(texts) - len(found) + 1)
        return np.concatenate([found, behind])

    def close(self) -> None:
        """Do nothing."""

    def _score(self, asked: list[int], text: str) -> float:
        read = self._tokenizer(text).input_ids[:_TEXT_TOKENS]
        with torch.inference_mode():
            logits = self._model(torch.tensor([read + asked])).logits[0, len(read) - 1 : -1]
        likelihoods = logits.log_softmax(-1)[torch.arange(len(asked)), torch.tensor(asked)]
        return float(likelihoods.mean())
