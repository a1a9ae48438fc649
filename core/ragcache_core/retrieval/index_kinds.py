"""The kinds of vector indexes that a collection can ask for."""

from __future__ import annotations

import enum


class IndexKind(enum.StrEnum):
    """How the chunks of a collection are searched. AUTO chooses by their number."""

    AUTO = "auto"
    FLAT = "flat"
    IVF = "ivf"
    HNSW = "hnsw"
