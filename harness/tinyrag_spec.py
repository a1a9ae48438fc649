"""Fields of a RagCache with the test model, which answers known questions and starts fast."""

from __future__ import annotations

from typing import Any, Final

TINYRAG: Final[dict[str, Any]] = {
    "model": {"source": "bundled:tinyrag"},
    # Chunk sizes of its training: short chunks, and a hit includes its whole page.
    "retriever": {"chunking": {"size": 96, "overlap": 16, "window": 2}},
}
