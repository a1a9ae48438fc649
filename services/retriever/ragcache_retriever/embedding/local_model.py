"""An embedder in the retriever's process: the bundled model, or one from a folder or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.embedding.batch_threads import BatchThreads
from ragcache_retriever.embedding.embedder import Vectors, normalised
from ragcache_retriever.embedding.first_tokens import LONG_CHARS, FirstTokens
from ragcache_retriever.embedding.model_files import ModelFiles, read_model_files
from ragcache_retriever.embedding.text_encoder import (
    Precision,
    TextEncoder,
    Tokens,
    best_precision,
)

BATCH_TOKENS = 256
"""Most tokens of a batch on a CPU. Larger batches are no faster, and a query waits longer until the
batch is between two steps."""
QUERY_BATCH_TOKENS = 256
"""Most tokens of a batch of queries on a CPU. Larger ones are no faster, only later."""
GPU_BATCH_TOKENS = 1 << 14
MAX_QUERY_THREADS = 4

MAX_URGENT_TEXTS = 16
"""Most texts of one call that go before documents. More of them would pause ingestion for long."""

_TOKENIZED_TEXTS = 512
"""Texts of one document that are tokenized and wait at once."""


class LocalModel:
    """An embedding model in threads of its own, see BatchThreads.

    It reads the first tokens of a text, as many as the model allows.

    Args:
        find_folder: Returns the model's folder. It may download it.
        gate: Queries that pass it go before documents.
        num_threads: Batches that are embedded at once, each on one core.
        precision: What it computes in. None: bfloat16 where the CPU multiplies it, else float32.
            Retrieval is equally good with both, and their vectors are comparable.
        identity: See Embedder.identity. None: by the fingerprint of the model's files.
        max_tokens: Most tokens of a text that it reads. None: as the model's files say.
    """

    def __init__(
        self,
        find_folder: Callable[[], Path],
        gate: QueryGate,
        num_threads: int,
        precision: Precision | None = None,
        *,
        identity: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._find_folder = find_folder
        self._gate = gate
        self._num_threads = num_threads
        self._precision = precision
        self._identity = identity
        self._max_tokens = max_tokens
        self._dimension = 0
        self._tokenizing = ThreadPoolExecutor(1, "embedder-tokenizer")
        self._tokenizing_queries = ThreadPoolExecutor(1, "embedder-query-tokenizer")
        self._files: ModelFiles | None = None
        self._tokenizer: FirstTokens | None = None
        self._threads: BatchThreads | None = None

    @property
    def identity(self) -> str:
        """See Embedder.identity."""
        assert self._identity is not None, "it is started"
        return self._identity

    @property
    def dimension(self) -> int:
        """See Embedder.dimension."""
        return self._dimension

    async def start(self) -> None:
        """See Embedder.start."""
        await run(self._tokenizing, self._load)
        await self.embed(["ready?"], urgent=True)

    def adopt(self, identities: Iterable[str]) -> None:
        """See Embedder.adopt. The files of a model tell its identity."""

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        """See Embedder.embed."""
        assert self._threads is not None, "it is started"
        vectors = [np.empty((0, self._dimension), np.float32)]
        if urgent and len(texts) <= MAX_URGENT_TEXTS:
            with self._gate.query():
                vectors.append(await self._threads.embed_queries(await self._queries(texts)))
        else:
            for i in range(0, len(texts), _TOKENIZED_TEXTS):
                part = texts[i : i + _TOKENIZED_TEXTS]
                tokens = await run(self._tokenizing, self._all_tokens, part, urgent)
                vectors.append(await self._threads.embed_documents(tokens))
        return normalised("embedder", np.concatenate(vectors))

    async def close(self) -> None:
        """See Embedder.close."""
        await finish(self._tokenizing)
        await finish(self._tokenizing_queries)
        if self._threads is not None:
            await self._threads.stop()

    def _load(self) -> None:
        if self._threads is not None:
            return  # a start that failed later is tried again
        # Importing torch takes seconds. Here, the event loop answers health checks meanwhile.
        import torch  # noqa: PLC0415

        files = read_model_files(self._find_folder())
        self._files = files
        self._tokenizer = _load_tokenizer(files.folder, self._max_tokens or files.max_tokens)
        # Only the torch of the GPU image finds a device.
        on_gpu = torch.cuda.is_available()
        # Each thread computes alone. Threads that share one batch wait for the slowest of them at
        # each step, which is 50 times slower next to a busy engine.
        torch.set_num_threads(1)
        precision = self._precision or best_precision(on_gpu, torch.cpu.get_capabilities())
        encoder = self._load_encoder(files, "cuda" if on_gpu else "cpu", precision)
        self._dimension = encoder.dimension
        self._identity = self._identity or f"model:{files.fingerprint}"
        self._threads = BatchThreads(
            encoder.embed,
            self._gate,
            dimension=encoder.dimension,
            num_threads=1 if on_gpu else self._num_threads,
            num_query_threads=1 if on_gpu else min(self._num_threads, MAX_QUERY_THREADS),
            max_batch_tokens=GPU_BATCH_TOKENS if on_gpu else BATCH_TOKENS,
            max_query_tokens=GPU_BATCH_TOKENS if on_gpu else QUERY_BATCH_TOKENS,
        )

    def _load_encoder(self, files: ModelFiles, device: str, precision: Precision) -> TextEncoder:
        import torch  # noqa: PLC0415

        # These import torch.
        from ragcache_retriever.embedding.bert_encoder import BertEncoder  # noqa: PLC0415
        from ragcache_retriever.embedding.sentence_encoder import SentenceEncoder  # noqa: PLC0415

        dtype = getattr(torch, precision)
        if files.pooling is None:
            max_tokens = self._max_tokens or files.max_tokens
            return SentenceEncoder(files.folder, device, dtype, max_tokens, self._wait_for_queries)
        return BertEncoder(files.folder, files.pooling, device, dtype, self._wait_for_queries)

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
