"""Chooses what each pass of a simulated engine computes, as vLLM's scheduler does.

Running requests come first: each decodes one token, or computes the next part of its prompt. Then
waiting requests begin, by priority and arrival, as long as tokens and blocks suffice. Unlike vLLM
it reserves the blocks of the whole answer, so it never preempts a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.support.cluster.block_cache import BlockCache, BlockHash
from bench.support.cluster.engine_times import EngineTimes
from ragcache_engine.protocol.messages import LoadOutcome
from ragcache_engine.scheduler.scheduler import ConnectorScheduler


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request. ``computed`` counts the tokens whose KV it has, ``generated`` those it wrote."""

    id: str
    token_ids: Sequence[int]
    max_tokens: int
    priority: int
    hashes: Sequence[BlockHash]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    cached: int = 0
    is_loading: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the whole answer is written."""
        return self.generated >= self.max_tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass computes. ``progress``: request, tokens before, tokens of this pass."""

    progress: tuple[tuple[EngineRequest, int, int], ...]

    def seconds(self, times: EngineTimes) -> float:
        """Return how long the pass takes."""
        decodes = [before for one, before, _ in self.progress if before >= len(one.token_ids)]
        prefills = [
            (before, tokens) for one, before, tokens in self.progress if before < len(one.token_ids)
        ]
        return times.pass_s(prefills, decodes)


class PassScheduler:
    """The queue and the running requests of one engine.

    Args:
        times: The sizes of the engine.
        cache: Its blocks.
        connector: Says what to load.
    """

    def __init__(
        self, times: EngineTimes, cache: BlockCache, connector: ConnectorScheduler
    ) -> None:
        self._times = times
        self._cache = cache
        self._connector = connector
        self._waiting: list[EngineRequest] = []
        self._running: list[EngineRequest] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not (self._waiting or self._running)

    def add(self, request: EngineRequest) -> None:
        """Queue a request by its priority."""
        self._waiting.append(request)
        self._waiting.sort(key=lambda one: one.priority)  # stable: by arrival among equals

    def next_pass(self) -> Pass:
        """Choose what to compute now. It is empty if no request can go on."""
        budget = self._times.profile.pass_tokens
        progress = []
        for request in self._running:
            tokens = min(max(1, len(request.token_ids) - request.computed), budget)
            if tokens:
                progress.append((request, request.computed, tokens))
            budget -= tokens
        for request in self._startable():
            if not budget or len(self._running) >= self._times.max_requests:
                break
            tokens = min(len(request.token_ids) - request.computed, budget)
            self._waiting.remove(request)
            self._running.append(request)
            progress.append((request, request.computed, tokens))
            budget -= tokens
        for request, before, tokens in progress:
            self._publish(request, before + tokens)
        return Pass(tuple(progress))

    def end_pass(self, done: Pass) -> list[EngineRequest]:
        """Apply a pass. Return the requests for which it has generated a token."""
        written = []
        for request, before, tokens in done.progress:
            request.computed = before + tokens
            if request.computed >= len(request.token_ids) and request in self._running:
                request.generated += 1
                written.append(request)
        for request in written:
            if request.is_done:
                self.remove(request)
        return written

    def end_load(self, request: EngineRequest, outcome: LoadOutcome) -> None:
        """Let a request go on after its load. What has not arrived is computed."""
        request.is_loading = False
        if request.blocks:
            request.computed = request.cached + outcome.tokens
            self._publish(request, request.computed)

    def remove(self, request: EngineRequest) -> None:
        """Remove a request that has ended or was aborted. Nothing happens a second time."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
                self._connector.on_finished(request.id, request.blocks)
                self._cache.free(request.blocks)
                request.blocks = []

    def _startable(self) -> Iterator[EngineRequest]:
        """Yield waiting requests that can be computed now, and begin the loads of others."""
        for request in list(self._waiting):
            if request.is_loading:
                continue
            if request.blocks:  # its load has ended
                self._connector.on_allocated(request.id, request.blocks, 0)
                yield request
                continue
            # vLLM always computes the last token of a prompt.
            block_tokens = self._cache.block_tokens
            usable = request.hashes[: (len(request.token_ids) - 1) // block_tokens]
            cached = usable[: self._cache.cached_blocks(usable)]
            num_local = len(cached) * block_tokens
            loadable = self._connector.loadable_tokens(request.id, num_local)
            if loadable is None:
                continue
            num_tokens = len(request.token_ids) + request.max_tokens
            blocks = self._cache.allocate(cached, -(-num_tokens // block_tokens))
            if blocks is None:
                return
            request.blocks, request.computed, request.cached = blocks, num_local, num_local
            request.is_loading = loadable > 0
            self._connector.on_allocated(request.id, blocks, loadable)
            if not request.is_loading:
                yield request

    def _publish(self, request: EngineRequest, computed: int) -> None:
        num_full = computed // self._cache.block_tokens
        self._cache.publish(request.blocks, request.hashes[:num_full])
