"""Generated vectors with the clusters of text embeddings, and queries of varying difficulty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DIMENSION = 384

_VECTORS_PER_TOPIC = 250
_TOPICS_PER_FIELD = 20
_SPECTRUM_POWER = 0.8  # variance of the i-th direction falls with i to this power
_FIELD_WEIGHT = 0.6
_TOPIC_WEIGHT = 0.7
_TOPIC_SPREAD = (1.1, 0.4)  # median and log-deviation of the width of a topic
_BLOCK = 1 << 14

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Clusters:
    """Fields hold topics, and topics hold vectors. Topics differ in size (Zipf) and in width."""

    centres: Vectors
    widths: Vectors
    shares: npt.NDArray[np.float64]
    scales: Vectors


def make_clusters(num_vectors: int, draw: np.random.Generator) -> Clusters:
    """Draw the topics for a number of vectors."""
    scales = np.arange(1, DIMENSION + 1, dtype=np.float32) ** (-_SPECTRUM_POWER / 2)
    scales /= np.linalg.norm(scales)
    num_topics = max(8, num_vectors // _VECTORS_PER_TOPIC)
    num_fields = max(2, num_topics // _TOPICS_PER_FIELD)
    fields = _noise(draw, num_fields, scales)
    field_of = draw.integers(num_fields, size=num_topics)
    centres = _FIELD_WEIGHT * fields[field_of] + _TOPIC_WEIGHT * _noise(draw, num_topics, scales)
    median, deviation = _TOPIC_SPREAD
    widths = (median * np.exp(deviation * draw.standard_normal(num_topics))).astype(np.float32)
    shares = 1.0 / np.arange(1, num_topics + 1) ** 0.6
    return Clusters(centres, widths, shares / shares.sum(), scales)


def draw_vectors(clusters: Clusters, num: int, draw: np.random.Generator) -> Vectors:
    """Draw vectors of length 1, shape (num, DIMENSION)."""
    vectors = np.empty((num, DIMENSION), np.float32)
    topics = draw.choice(len(clusters.centres), size=num, p=clusters.shares)
    for begin in range(0, num, _BLOCK):
        of = topics[begin : begin + _BLOCK]
        noise = _noise(draw, len(of), clusters.scales)
        vectors[begin : begin + _BLOCK] = clusters.centres[of] + clusters.widths[of, None] * noise
    return _normalized(vectors)


def draw_queries(
    clusters: Clusters, vectors: Vectors, num: int, draw: np.random.Generator
) -> Vectors:
    """Draw queries of length 1: half of them near a vector, a quarter near the centre of a topic,
    and a quarter between two topics."""
    queries = np.empty((num, DIMENSION), np.float32)
    noise = _noise(draw, num, clusters.scales)
    kinds = draw.choice(3, size=num, p=(0.5, 0.25, 0.25))
    some = draw.integers(len(vectors), size=num)
    topics = draw.choice(len(clusters.centres), size=(num, 2), p=clusters.shares)
    centres = _normalized(clusters.centres)
    near, centred, between = (kinds == kind for kind in range(3))
    queries[near] = vectors[some[near]] + 0.7 * noise[near]
    queries[centred] = centres[topics[centred, 0]] + 0.5 * noise[centred]
    queries[between] = centres[topics[between]].mean(axis=1) + 0.5 * noise[between]
    return _normalized(queries)


def _noise(draw: np.random.Generator, num: int, scales: Vectors) -> Vectors:
    return draw.standard_normal((num, DIMENSION), dtype=np.float32) * scales


def _normalized(vectors: Vectors) -> Vectors:
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors
