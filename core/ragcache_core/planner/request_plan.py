"""The plan of one request, as the gateway has predicted it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Literal

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.planner.document_order import RankedDocument


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt whose documents have no order yet.

    Attributes:
        head: Key of each segment of the template's head.
        head_tokens: Length of each of them.
        documents: Best rank first.
        tail_tokens: Tokens after the documents.
    """

    head: Sequence[ChunkKey]
    head_tokens: Sequence[int]
    documents: Sequence[RankedDocument]
    tail_tokens: int

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        documents = sum(sum(document.num_tokens) for document in self.documents)
        return sum(self.head_tokens) + documents + self.tail_tokens


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What a request allows.

    Attributes:
        order: ``rank``: documents keep their ranks. ``cached``: those that are stored come first.
        reuse: As in ``ReusePlan``; ``off``: nothing stored is used.
        max_displacement: Most positions that a document may move. None: no limit.
        recompute_share: Share of blended tokens that are recomputed.
        token_bytes: Bytes of one token's KV.
    """

    order: Literal["rank", "cached"]
    reuse: Literal["exact", "blend", "off"]
    max_displacement: int | None
    recompute_share: float
    token_bytes: float


EngineRole = Literal["both", "prefill", "decode"]
"""What an engine does for a request: all of it, or only one of the two phases."""


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """The state of an engine, as far as a plan needs it.

    Attributes:
        source: Name in the knowledge tree, ``engine:ADDRESS``.
        costs: None: it has not reported them. See ``plan_request``.
        queue_s: Predicted seconds until it can begin with a request.
        in_flight: Requests that it is answering.
        last_chosen: Number of the last request that it got. Engines without one have 0.
        reads_store: Whether it loads KV from the cache store. One without RagCache does not, and
            reports no costs.
        computed: Leading chunks of prompts that it has computed while the request's search ran. The
            tree may not have them yet, because the engine's feed takes a few milliseconds.
        num_decoding: Requests whose answers it generates.
        free_tokens: Tokens of KV that its cache can take without preempting a request. None: it
            has not said it.
        role: What it does for a request: all of it, or only one of the two phases.
    """

    source: str
    costs: EngineCosts | None
    queue_s: float
    in_flight: int
    last_chosen: int
    reads_store: bool = True
    computed: Sequence[Sequence[ChunkKey]] = ()
    num_decoding: int = 0
    free_tokens: int | None = None
    role: EngineRole = "both"


class ChunkAction(StrEnum):
    """What a plan does with a chunk."""

    CACHED = "cached"  # the engine has it in its prefix cache
    LOAD = "load"  # load the variant after the same prefix
    BLEND = "blend"  # load a variant after another prefix and recompute a share
    COMPUTE = "compute"


class PlanReason(StrEnum):
    """Why a plan does that."""

    RESIDENT = "resident"  # in the engine's prefix cache
    STORED = "stored"  # after the same prefix
    OTHER_PREFIX = "other_prefix"  # stored, but only after another prefix
    NOT_STORED = "not_stored"
    AFTER_GAP = "after_gap"  # stored, but a chunk before it is not
    OTHER_ENGINE = "other_engine"  # only another engine has it
    SLOWER = "slower"  # computing it is predicted to be faster
    REUSE_OFF = "reuse_off"


@dataclass(frozen=True, slots=True)
class ChunkDecision:
    """What a plan does with one segment of the prompt.

    Attributes:
        tier: Where it is used from; "" if it is computed.
        source: The engine or cache store that has it; "" if it is computed.
    """

    chunk: ChunkKey
    num_tokens: int
    action: ChunkAction
    reason: PlanReason
    tier: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class PlanSeconds:
    """Predicted seconds to the first token, by part.

    Attributes:
        queue_s: Until the engine can begin.
        load_s: Loads from host memory and from the cache store.
        recompute_s: Tokens that are recomputed in a blend.
        prefill_s: Tokens that are computed.
    """

    queue_s: float
    load_s: float
    recompute_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.queue_s + self.load_s + self.recompute_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class PlanAlternative:
    """A plan that was not chosen.

    Attributes:
        reuse: ``compute``: what is not in the engine's prefix cache is computed.
    """

    source: str
    order: tuple[int, ...]
    reuse: Literal["compute", "exact", "blend"]
    seconds: PlanSeconds


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The chosen order and engine, and what to do with each chunk.

    Attributes:
        order: Rank of the document at each position.
        source: The engine. "": none is known.
        decisions: Segments of the head and all chunks, in prompt order.
        seconds: None: no engine has reported its costs.
        runner_up: The next best plan. None: there is none, or nothing can be predicted.
        num_considered: Plans that were compared, this one included.
        prefill_source: The engine that computes the prompt for the other one. "": there is none.
        handoff_s: Predicted seconds that the other one then needs to load it and to begin.
    """

    order: tuple[int, ...]
    source: str
    decisions: tuple[ChunkDecision, ...] = ()
    seconds: PlanSeconds | None = None
    runner_up: PlanAlternative | None = None
    num_considered: int = 1
    prefill_source: str = ""
    handoff_s: float = 0.0
    is_reordered: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_reordered", self.order != tuple(range(len(self.order))))

    @property
    def reused_tokens(self) -> int:
        """Tokens of the leading chunks that the engine has or loads exactly."""
        exact = (ChunkAction.CACHED, ChunkAction.LOAD)
        return sum(d.num_tokens for d in takewhile(lambda d: d.action in exact, self.decisions))

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of all chunks that the engine has or loads, blended ones too."""
        return sum(d.num_tokens for d in self.decisions if d.action is not ChunkAction.COMPUTE)
