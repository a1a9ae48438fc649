"""The recorded sequences of a folder of data sets, by name."""

from __future__ import annotations

from pathlib import Path

from bench.support.sequences.prompts import Vocabulary
from bench.support.sequences.ragpulse import RagPulse
from bench.support.sequences.retrieved import FILES, RetrievedPassages

RAGPULSE = "ragpulse"
RECORDED = (RAGPULSE, *FILES)


def load_recorded(
    name: str, data: Path, model: Path, vocabulary: Vocabulary, *, scale: float, max_tokens: int
) -> RagPulse | RetrievedPassages:
    """Load a recorded sequence.

    Args:
        name: One of ``RECORDED``.
        data: Folder with a folder for each data set.
        model: Folder of the model that is asked.
        vocabulary: Draws the tokens of RAGPulse, which has no text.
        scale: Factor of RAGPulse's lengths.
        max_tokens: Longest prompt of RAGPulse. Longer ones lose what follows their passages.
    """
    if name == RAGPULSE:
        return RagPulse(data / RAGPULSE, vocabulary, scale, max_tokens)
    return RetrievedPassages(data / "psirag_retrieved" / FILES[name], model)
