"""Recognizes the model behind an endpoint by the vectors that it gives to a few texts.

An endpoint may serve another model under the same name. The vectors of one model differ a little
from server to server, by precision and by batch, so a sketch of them is compared by its angle.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

import numpy as np
import numpy.typing as npt

PROBES = (
    "The service runs in region north and is owned by the team that answers its alerts.",
    "Wie wird Brot gebacken?",
    "def total(values): return sum(values) if values else 0",
)
MIN_COSINE = 0.997
"""Of sketches of one model. Precisions differ by 0.0005; a model trained further by 0.01 or more,
of which a sketch shows all but a quarter."""
_NUM_VALUES = 96


def sketch(vectors: npt.NDArray[np.float32]) -> str:
    """Return a short text that tells about the vectors of the probes, shape (probes, dimension)."""
    flat = vectors.ravel().astype(np.float64)
    signs = hashlib.shake_256(b"ragcache-probe").digest(_NUM_VALUES * len(flat) // 8)
    matrix = np.unpackbits(np.frombuffer(signs, np.uint8)).reshape(_NUM_VALUES, -1) * 2.0 - 1
    projected = matrix @ flat
    scale = 127 / max(np.abs(projected).max(), 1e-12)
    values = np.round(projected * scale).astype(np.int8)
    return base64.urlsafe_b64encode(values.tobytes()).decode()


def is_same_model(one: str, other: str) -> bool:
    """Whether two sketches are of one model. False for a text that is no sketch."""
    a, b = _values(one), _values(other)
    if a is None or b is None:
        return False
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return lengths > 0 and float(a @ b) / lengths >= MIN_COSINE


def _values(text: str) -> npt.NDArray[np.float64] | None:
    try:
        content = base64.urlsafe_b64decode(text.encode())
    except (binascii.Error, ValueError):
        return None
    if len(content) != _NUM_VALUES:
        return None
    return np.frombuffer(content, np.int8).astype(np.float64)
