"""Copy computed values out of the paged cache, for the store and for the worker's own tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.handoff.layer_staging import LayerStaging
from ragcache_engine.kv_cache.incoming_value import OfferedValue
from ragcache_engine.kv_cache.paged_cache import PagedCache, TokenRange
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.tiers.local_tiers import LocalTiers
from ragcache_engine.worker.pass_timer import PassTimer
from ragcache_engine.worker.saver import Saver

log = logging.getLogger("vllm.ragcache")


class ValueExporter:
    """Exports the values that a pass computed, before the next pass may overwrite their blocks.

    Args:
        cache: The paged cache.
        saver: Sends values to the store.
        tiers: The worker's tiers, which are offered each value.
        staging: Copies layers of the values that another engine waits for, while a pass computes.
        timer: Measures compute costs.
    """

    def __init__(
        self,
        cache: PagedCache,
        saver: Saver,
        tiers: LocalTiers,
        staging: LayerStaging,
        timer: PassTimer,
    ) -> None:
        self._cache = cache
        self._saver = saver
        self._tiers = tiers
        self._staging = staging
        self._timer = timer
        self._computed: list[SaveJob] = []

    def begin_pass(self, jobs: Iterable[SaveJob]) -> None:
        """Begin to send the values that this pass will compute and another engine waits for."""
        self._staging.end_pass()  # of a pass that was interrupted
        for job in jobs:
            try:
                # What is not exact may still be corrected at the end of the pass.
                streams = job.hands_off and job.info.provenance.exact
                if streams and self._saver.has_room(job.span.variant, job.info.num_bytes):
                    self._saver.stream(job, self._staging.begin(job))
            except Exception:
                log.exception("worker: cannot send a variant while it is computed")

    def layer_done(self, layer: int) -> None:
        """Stage a layer that the running pass has computed."""
        self._staging.copy_layer(layer)

    def end_pass(self, computed: Iterable[SaveJob]) -> None:
        """Note the values that a pass computed. ``export`` copies them later.

        Values that another engine waits for are exported now, before the first token.
        """
        jobs = list(computed)
        self._computed += [job for job in jobs if not job.hands_off]
        self._export_all([job for job in jobs if job.hands_off])
        self._staging.end_pass()

    def export(self) -> None:
        """Copy the computed values out of the cache, queue them for the store, and offer them."""
        jobs, self._computed = self._computed, []
        self._export_all(jobs)

    def _export_all(self, jobs: Sequence[SaveJob]) -> None:
        copied: dict[VariantKey, SaveJob] = {}
        for job in jobs:
            try:
                if (staged := self._staging.take(job)) is not None:  # the saver already sends it
                    staged.complete(self._timer.cost_s(job))
                    self._offer(job, staged.value.nbytes, staged.wait_for_value)
                elif job.span.variant not in copied:
                    queued = sum(one.info.num_bytes for one in copied.values())
                    if self._saver.has_room(job.span.variant, queued + job.info.num_bytes):
                        copied[job.span.variant] = job
            except Exception:
                log.exception("worker: cannot save a variant")
        if copied:
            self._copy_and_save(tuple(copied.values()))
        if jobs:
            self._tiers.start_rebalance()

    def close(self) -> None:
        """Abort the values in progress."""
        self._staging.close()
        self._saver.close()

    def _copy_and_save(self, jobs: Sequence[SaveJob]) -> None:
        """Copy values out of the cache together. Several are as many operations as one is."""
        try:
            copies = self._copy_out(jobs)
        except Exception:
            if len(jobs) > 1:  # one of them may be the reason
                for job in jobs:
                    self._copy_and_save((job,))
                return
            log.exception("worker: cannot save a variant")
            return
        for job, native in zip(jobs, copies, strict=True):
            try:
                self._saver.save(job, native, self._timer.cost_of(job))
                self._offer(job, job.info.num_bytes, native)
            except Exception:
                log.exception("worker: cannot save a variant")

    def _offer(
        self, job: SaveJob, num_bytes: int, native: Callable[[], torch.Tensor | None]
    ) -> None:
        offer = OfferedValue(job.span.variant, job.info, num_bytes, job.origin.domain, native)
        self._tiers.offer((offer,))

    def _copy_out(self, jobs: Sequence[SaveJob]) -> list[Callable[[], torch.Tensor]]:
        """Start to copy values out of the cache; return a function for each, which waits for it.

        A GPU copies before the next pass, and this method does not wait for it.
        """
        tokens = [TokenRange(job.blocks, job.span.start, job.span.end) for job in jobs]
        values = [self._cache.empty(one.end - one.start) for one in tokens]
        self._cache.read_layers(tokens, values)
        copied = self._timer.record_event()
        if copied is None:  # then by a synchronous copy
            values = [self._cache.read(one.blocks, one.start, one.end) for one in tokens]

        def native(value: torch.Tensor) -> torch.Tensor:
            if copied is not None:
                copied.wait()
            return value

        return [partial(native, value) for value in values]
