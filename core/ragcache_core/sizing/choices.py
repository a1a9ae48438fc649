"""What a platform is sized for: its model, its demand, and what the user chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision


@dataclass(frozen=True, slots=True)
class SizedModel:
    """What the sizes need to know of a model.

    Attributes:
        token_bytes: Native KV of one token.
        dtype: Type of the KV's numbers.
        weights_bytes: Size of the weights in memory.
    """

    token_bytes: int
    num_layers: int
    dtype: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Documents and requests.

    Attributes:
        num_chunks: Chunks of all documents.
        chunk_tokens: Tokens of one chunk.
        variants_per_chunk: Variants to keep of each chunk. ``blend`` needs one, and ``exact`` one
            for each prefix that requests repeat.
        zipf_exponent: How unevenly chunks are read. 0: all equally often.
        requests_per_s: Questions per second, of all users.
        prompt_tokens: Tokens of one prompt, with its chunks.
        prompt_chunks: Chunks of one prompt.
        answer_tokens: Longest answer.

    Raises:
        InvalidInput: The chunks are longer than their prompt.
    """

    num_chunks: int
    chunk_tokens: int
    variants_per_chunk: int
    zipf_exponent: float
    requests_per_s: float
    prompt_tokens: int
    prompt_chunks: int
    answer_tokens: int

    def __post_init__(self) -> None:
        if self.document_tokens > self.prompt_tokens:
            raise InvalidInput(
                "prompt tokens",
                f"are {self.prompt_tokens}, and the chunks of a prompt have {self.document_tokens}",
                "count all tokens of a prompt, or name fewer or shorter chunks",
            )

    @property
    def document_tokens(self) -> int:
        """Tokens of the chunks of one prompt."""
        return self.prompt_chunks * self.chunk_tokens

    @property
    def request_tokens(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """The goals for the cache store.

    Attributes:
        shards: Number of shards.
        hit_share: Share of chunk reads that the store should answer.
        memory_hit_share: Share of chunk reads that its memory tier should answer.
        memory_bytes: Memory tier of each shard. None: what memory_hit_share needs.
        volume_bytes: Volume of each shard. None: what hit_share needs.
    """

    precision: Precision
    shards: int
    hit_share: float
    memory_hit_share: float
    memory_bytes: int | None = None
    volume_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReuseChoice:
    """How engines reuse KV.

    Attributes:
        mode: As spec.reuse.mode.
        recompute_share: Share of the loaded tokens that ``blend`` recomputes.
        reused_share: Measured share of prompt tokens whose KV is loaded. None: the hit share of the
            store for ``blend``, and 0 for ``exact``, whose hits depend on the prefixes.
    """

    mode: Literal["exact", "blend"]
    recompute_share: float
    reused_share: float | None = None


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The traffic that the engines must serve.

    Attributes:
        costs: Measured costs of one engine. None: unknown.
        decode_s: Seconds of an engine that the tokens of one answer take.
        utilization: Share of its time that an engine is busy, in (0, 1].
        concurrent_requests: Requests that one engine runs at once.
        max_length: Most tokens of a prompt and its answer, which one request may take.
    """

    costs: EngineCosts | None
    decode_s: float
    utilization: float
    concurrent_requests: int
    host_tier_bytes: int
    max_length: int


@dataclass(frozen=True, slots=True)
class IndexChoice:
    """The vector index, as in spec.retriever.index."""

    dimension: int
    precision: Literal["float32", "sq8"]
    has_graph: bool
