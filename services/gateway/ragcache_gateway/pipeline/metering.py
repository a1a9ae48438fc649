"""What a question uses of its caller's quotas: reserved before it is sent, counted at its end."""

from __future__ import annotations

from ragcache_core.access.usage import UsageCounts
from ragcache_core.planner.request_plan import ChunkAction
from ragcache_gateway.admission.quotas import current_ticket
from ragcache_gateway.engines.completion import Usage
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.pipeline.plan import PlannedQuestion
from ragcache_wire.v1 import engine_pb2


def reserve_answer(planned: PlannedQuestion, model: str) -> None:
    """Reserve the tokens of a planned question, see ``UsageTicket.reserve``.

    Raises QuotaExceeded.
    """
    ticket = current_ticket()
    if ticket is None:
        return
    num_tokens = {ChunkAction.CACHED: 0, ChunkAction.LOAD: 0}
    for decision in planned.plan.decisions:
        if decision.action in num_tokens:
            num_tokens[decision.action] += decision.num_tokens
    cached, loaded = num_tokens[ChunkAction.CACHED], num_tokens[ChunkAction.LOAD]
    length = len(planned.prompt.prompt.token_ids)
    expected = UsageCounts(
        computed_tokens=max(0, length - cached - loaded),
        cached_tokens=cached,
        loaded_tokens=loaded,
    )
    num_choices = planned.question.request.num_choices()
    ticket.reserve(model, expected, num_choices * planned.prompt.max_tokens)


def begin_output(completion: Completion | WholeCompletion) -> None:
    """Have an answer counted as far as it has come, if the client leaves before its end."""
    ticket = current_ticket()
    if ticket is not None and isinstance(completion, Completion):
        ticket.begin_output(lambda: completion.num_relayed)


def settle(usage: Usage | None, record: engine_pb2.RequestRecord | None) -> None:
    """Count the tokens of a complete answer.

    Args:
        usage: The engine's count. None: it did not send one, and what was expected counts.
        record: Says where the prompt's KV came from. None: the usage may say what was cached.
    """
    ticket = current_ticket()
    if ticket is not None and usage is not None:
        ticket.settle(used_tokens(usage, record))


def used_tokens(usage: Usage, record: engine_pb2.RequestRecord | None) -> UsageCounts:
    """Return the tokens of an answer and its prompt, by where the KV came from."""
    if record is None:
        details = usage.prompt_tokens_details
        cached = min((details and details.cached_tokens) or 0, usage.prompt_tokens)
        return UsageCounts(
            computed_tokens=usage.prompt_tokens - cached,
            cached_tokens=cached,
            output_tokens=usage.completion_tokens,
        )
    reused = record.local_tokens + record.loaded_tokens
    return UsageCounts(
        computed_tokens=max(0, record.prompt_tokens - reused),
        cached_tokens=record.local_tokens,
        loaded_tokens=max(0, record.loaded_tokens - record.recomputed_tokens),
        recomputed_tokens=record.recomputed_tokens,
        output_tokens=usage.completion_tokens,
    )
