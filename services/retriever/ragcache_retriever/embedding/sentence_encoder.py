"""Any model of sentence-transformers, for models that ``bert_encoder`` does not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragcache_core.errors import InvalidInput
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.embedding.text_encoder import Tokens

LENGTH_STEP = 32
"""Batches are padded to a multiple of it, because each new shape has kernels compiled."""


class SentenceEncoder:
    """Computes a model with the modules of the sentence-transformers library.

    Args:
        device: As torch names it.
        dtype: Number format to compute in.
        max_tokens: Most tokens of a text, and of a batch's width.
        before_batch: Called before each batch. It may wait.

    Raises:
        InvalidInput: The library cannot load the model without running code of it.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: torch.dtype,
        max_tokens: int,
        before_batch: Callable[[], None],
    ) -> None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  slow to import

        try:
            model: Any = SentenceTransformer(
                str(folder),
                device=device,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"dtype": dtype},
            )
        except Exception as error:  # each family raises errors of its own
            raise InvalidInput(
                "RAGCACHE_EMBEDDER",
                f"{folder} cannot be loaded: {error}",
                "name a model that sentence-transformers loads without code of the model's",
            ) from error
        self._model = model.eval()
        self._device = device
        self._max_tokens = max_tokens
        self._padding = int(getattr(model.tokenizer, "pad_token_id", None) or 0)
        self._before_batch = before_batch
        self.dimension = self.embed([[self._padding]]).shape[1]

    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        """See TextEncoder.embed."""
        torch.set_num_threads(1)  # it applies to the calling thread
        self._before_batch()
        lengths = [len(tokens) for tokens in batch]
        width = min(-(-max(lengths) // LENGTH_STEP) * LENGTH_STEP, self._max_tokens)
        ids = np.full((len(batch), width), self._padding, np.int64)
        mask = np.zeros_like(ids)
        for row, (tokens, length) in enumerate(zip(batch, lengths, strict=True)):
            ids[row, :length] = tokens
            mask[row, :length] = 1
        features = {
            "input_ids": torch.from_numpy(ids).to(self._device),
            "attention_mask": torch.from_numpy(mask).to(self._device),
        }
        with torch.inference_mode():
            vectors: Vectors = self._model(features)["sentence_embedding"].float().cpu().numpy()
        return vectors
