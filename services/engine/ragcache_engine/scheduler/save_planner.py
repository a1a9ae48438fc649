"""Decides what of a request is saved to the store, and which of its chunks are observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Influence, Origin, Provenance, VariantInfo
from ragcache_core.plan.reuse_plan import Action, Handoff
from ragcache_core.plan.segments import NamedSegment
from ragcache_engine.protocol.messages import ObserveJob, SaveJob, VariantSpan
from ragcache_engine.scheduler.block_reservation import BlockReservation
from ragcache_engine.scheduler.request import RequestState
from ragcache_kv.values.layout import value_bytes


class SavePlanner:
    """Makes the jobs that save and observe what requests compute."""

    def __init__(self, space: KVSpace) -> None:
        self._space = space

    def take_saves(
        self,
        request_id: str,
        request: RequestState,
        computed: int,
        blocks_of: Callable[[str], Sequence[int]],
    ) -> list[SaveJob]:
        """Return the saves of segments that end within the first ``computed`` tokens, once each.

        The request remembers them in ``saved``. The pieces of a blend that it hands off come with
        them.
        """
        indexes = request.segments_to_save(computed)
        pieces = request.take_blended_pieces(computed)
        if not indexes and not pieces:
            return []
        blocks = tuple(blocks_of(request_id))
        jobs = {}
        for index in indexes:
            before = request.segments[:index]
            parent = before[-1].variant if before else None
            origin = _origin(request, request.segments[index], before, parent)
            named = request.segments[index]
            jobs[index] = self._save_job(request_id, request, named, origin, blocks)
        request.saved.update(jobs)
        handed_off = []
        for piece in pieces:
            # A delete of any chunk whose KV is in the piece, or before it, deletes the piece.
            before = tuple(s for s in request.segments if s.segment.start < piece.segment.end)
            origin = _origin(request, piece, before, None)
            handed_off.append(self._save_job(request_id, request, piece, origin, blocks))
        return [*jobs.values(), *handed_off]

    def _save_job(
        self,
        request_id: str,
        request: RequestState,
        named: NamedSegment,
        origin: Origin,
        blocks: tuple[int, ...],
    ) -> SaveJob:
        start, end = named.segment.start, named.segment.end
        info = VariantInfo(
            num_tokens=end - start,
            num_bytes=value_bytes(self._space, end - start),
            base_position=start,
            # What comes before it was computed, loaded as exact, or is in vLLM's own prefix cache,
            # which shares no block of a blend. Unless something before it is blended.
            provenance=Provenance(exact=not request.is_approximate(named)),
        )
        span = VariantSpan(named.variant, start, end)
        return SaveJob(
            request_id,
            span,
            info,
            origin,
            request.as_of,
            blocks,
            request.traceparent,
            hands_off=request.plan.handoff is Handoff.PREFILL,
        )


def _origin(
    request: RequestState,
    named: NamedSegment,
    before: Sequence[NamedSegment],
    parent: VariantKey | None,
) -> Origin:
    return Origin(
        prefix_chunks=tuple(one.segment.chunk for one in before),
        parent=parent,
        domain=request.plan.domain,
        document=named.segment.document,
        token_s=request.token_s,
        influence=_influence(request, named),
    )


def _influence(request: RequestState, named: NamedSegment) -> Influence:
    plan = request.plan
    has_writer = plan.own_head or (
        request.is_approximate(named) and request.blend_may_have_writer()
    )
    writer = plan.reader.key if has_writer else b""
    return Influence(plan.reader.rights, writer, plan.num_head)


def observe_job(
    request_id: str,
    request: RequestState,
    blocks: Sequence[int],
    reservation: BlockReservation,
) -> ObserveJob | None:
    """Return the job that observes the chunks that a finished request saved, if there are any.

    The blocks of the job are then kept in the reservation.

    Args:
        request_id: vLLM's id of the request.
        request: The request.
        blocks: Its block table.
        reservation: Where to keep the blocks.
    """
    template = list(takewhile(lambda named: not _may_blend(named), request.segments))
    chunks = list(takewhile(_may_blend, request.segments[len(template) :]))
    indexes = range(len(template), len(template) + len(chunks))
    saves = {
        index: save
        for index, save in request.saved.items()
        if index in indexes
        # A later load may have overwritten its blocks.
        and save.info.provenance.exact
        and not request.is_approximate(request.segments[index])
    }
    if not saves:
        return None
    end = request.segments[max(saves)].segment.end
    num_blocks = reservation.num_blocks(end)
    # A preempted request has fewer blocks.
    if len(blocks) < num_blocks or not reservation.keep(request_id, num_blocks):
        return None
    return ObserveJob(
        request_id,
        request.token_ids[:end],
        tuple(blocks[:num_blocks]),
        (range(chunks[0].segment.start), *(_range(named) for named in chunks)),
        (b"", *(named.segment.chunk for named in chunks)),
        {index - len(template) + 1: save for index, save in saves.items()},
    )


def _may_blend(named: NamedSegment) -> bool:
    return named.segment.action is Action.BLEND


def _range(named: NamedSegment) -> range:
    return range(named.segment.start, named.segment.end)
