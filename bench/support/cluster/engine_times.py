"""How long a simulated engine takes: for passes, decodes, loads, and to accept a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ragcache_core.cost.prefill_profile import PrefillProfile


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Times and sizes of an engine.

    Attributes:
        profile: Seconds of prefill passes.
        accept_s: From a request's arrival until the scheduler has it.
        decode_s: A pass without prompt tokens, before what follows is added.
        decode_token_s: Added for each request that decodes.
        context_token_s: Added for each token of the contexts of these requests.
        load_s: Latency of a load from the cache store.
        load_token_s: Added for each token. Loads of one engine share its link.
        block_tokens: Tokens of a block of the prefix cache.
        cache_tokens: Tokens of the KV cache.
        max_requests: Most requests that run at once, as vLLM's ``--max-num-seqs``.
    """

    profile: PrefillProfile
    accept_s: float
    decode_s: float
    decode_token_s: float
    context_token_s: float
    load_s: float
    load_token_s: float
    block_tokens: int
    cache_tokens: int
    max_requests: int = 128

    def pass_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Return the seconds of one pass.

        Args:
            prefills: Tokens before, and tokens of, each prompt's part that the pass computes.
            contexts: Tokens before each token that it decodes.
        """
        computed = sum(tokens for _, tokens in prefills)
        seconds = self.decode_s
        if computed:
            cached = sum(before * tokens for before, tokens in prefills) / computed
            seconds = max(seconds, self.profile.predict(round(cached), computed))
        return seconds + self.decode_token_s * len(contexts) + self.context_token_s * sum(contexts)

    def scaled(self, factor: float) -> EngineTimes:
        """Return the times of an engine that is slower by a factor in everything."""
        rows = tuple(tuple(factor * s for s in row) for row in self.profile.seconds)
        named = ("accept_s", "decode_s", "decode_token_s", "context_token_s", "load_s")
        times = {name: factor * getattr(self, name) for name in (*named, "load_token_s")}
        return replace(self, profile=replace(self.profile, seconds=rows), **times)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which ``from_json`` reads."""
        names = (name for name in asdict(self) if name != "profile")
        return {"profile": self.profile.to_json()} | {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EngineTimes:
        """Read what ``to_json`` wrote."""
        return cls(**{**value, "profile": PrefillProfile.from_json(value["profile"])})


_LAYERS, _WIDTH, _TOKEN_BYTES, _WEIGHT_BYTES = 32, 4096, 128 << 10, 16e9
_ATTENTION, _LINEAR = 4, 26
_FLOPS, _MEMORY_BYTES_PER_S = 0.5 * 312e12, 0.8 * 2.04e12
_POINTS: Final = (1, 256, 1024, 2048)


def a100(link_gbits: float, cache_tokens: int) -> EngineTimes:
    """Return the times of a model like Llama 3 8B on an A100, from the two devices' limits.

    A prefill takes the operations of Mooncake section 2.2, equation 1, with the model's shape, at
    half of the 312 TFLOPS of table 1. A pass reads all weights, and the KV of each context, at 80 %
    of the memory's 2.04 TB/s. A token of KV has 128 KiB.

    Args:
        link_gbits: Bandwidth between engine and cache store. The testbed of RAGCache, section 7,
            has 25 Gbit/s, and that of Mooncake at least 100.
        cache_tokens: Tokens of the KV cache.
    """
    floor_s = _WEIGHT_BYTES / _MEMORY_BYTES_PER_S

    def prefill_s(cached: int, computed: int) -> float:
        squares = (cached + computed) ** 2 - cached**2
        operations = _ATTENTION * squares * _WIDTH + _LINEAR * computed * _WIDTH**2
        return max(floor_s, _LAYERS * operations / _FLOPS)

    cached = (0, 4096, 16384)
    rows = tuple(tuple(prefill_s(before, tokens) for tokens in _POINTS) for before in cached)
    return EngineTimes(
        PrefillProfile(cached, _POINTS, rows, _POINTS[-1]),
        accept_s=0.003,
        decode_s=floor_s,
        decode_token_s=5e-5,
        context_token_s=_TOKEN_BYTES / _MEMORY_BYTES_PER_S,
        load_s=0.004,
        load_token_s=_TOKEN_BYTES * 8 / (link_gbits * 1e9),
        block_tokens=16,
        cache_tokens=cache_tokens,
    )
