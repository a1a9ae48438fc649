"""What happens before the first token of an answer, reported to a client while it happens.

The events have no text of the answer or of documents. Before the search has ended they have only
counts, times and probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, RootModel

from ragcache_gateway.explain.explanation import PromptPart, to_ms
from ragcache_gateway.explain.schema import (
    ExplainedPlan,
    ExplainedStage,
    GuessOutcome,
    PlannedAction,
    PlannedTimes,
)
from ragcache_gateway.shown_address import ShownText

MAX_EVENTS: Final = 256
"""Most events of one answer, so that a client that reads nothing has little in memory. Searches
have fewer stages than this; later events of one that has more are left out."""

PrefillStep = Literal[GuessOutcome, "started", "kept", "cancelled"]


class _StageEvent(BaseModel):
    elapsed_ms: float = Field(description="Since the question arrived.")


class SearchBegun(_StageEvent):
    """The gateway has requested a search."""

    stage: Literal["search_begun"] = "search_begun"
    search: int = Field(description="Number of the search, from 1.")


class SearchAdvanced(_StageEvent):
    """A stage of a search has come."""

    stage: Literal["search"] = "search"
    search: int = Field(description="Number of the search, from 1.")
    hits: int
    progress: float = Field(description="Share of the search that is done, from 0 to 1.")
    final_probability: float = Field(
        description="Estimate that its hits are the final ones, from 0 to 1."
    )
    final: bool


class GuessChanged(_StageEvent):
    """A prompt is computed while the search runs, or not any more."""

    stage: Literal["guess"] = "guess"
    outcome: PrefillStep = Field(
        description="started; kept: a later stage has the same hits. cancelled: a later stage has "
        "others. warm-up: the prompt's beginning is computed. At the end of the search: confirmed, "
        "wrong or failed."
    )
    tokens: int = Field(description="Length of its prompt.")


class PlannedPart(BaseModel):
    """What the plan does with one part of the prompt."""

    chunk: str | None = Field(description="Id of the chunk. Null: a part of the template.")
    tokens: int
    planned: PlannedAction
    reason: str


class PromptPlanned(_StageEvent):
    """The search has ended, and the plan of the prompt is made."""

    stage: Literal["plan"] = "plan"
    engine: ShownText = Field(description="Address of the engine. Empty: none was known.")
    prompt_tokens: int
    parts: list[PlannedPart] = Field(description="In the order of the prompt; the question is not.")
    predicted_ms: PlannedTimes | None = Field(
        description="Null: an engine has not said what computing costs."
    )


class EngineAccepted(_StageEvent):
    """An engine has accepted the request. After a failure, another one accepts it."""

    stage: Literal["engine"] = "engine"
    engine: ShownText = Field(description="Address of the engine.")


class FirstTokenArrived(_StageEvent):
    """The first token has come. It is the last of these events."""

    stage: Literal["first_token"] = "first_token"


AnyStageEvent = (
    SearchBegun | SearchAdvanced | GuessChanged | PromptPlanned | EngineAccepted | FirstTokenArrived
)


class StageEvent(RootModel[Annotated[AnyStageEvent, Field(discriminator="stage")]]):
    """Data of an event named `ragcache.stage`, which comes before the first token."""


class Progress:
    """Reports to one client what happens before its first token.

    Args:
        listener: Gets each event. None: no client wants them.
        started_s: When the question arrived, on the clock of time.perf_counter.
    """

    def __init__(
        self, listener: Callable[[AnyStageEvent], None] | None = None, started_s: float = 0.0
    ) -> None:
        self._listener = listener
        self._started_s = started_s
        self._num_searches = 0
        self._num_left = MAX_EVENTS

    def end(self) -> None:
        """Report nothing more."""
        self._listener = None

    def search_begun(self) -> None:
        """Report that a search was requested."""
        self._num_searches += 1
        self._report(SearchBegun(elapsed_ms=self._elapsed_ms(), search=self._num_searches))

    def search_advanced(self, stage: ExplainedStage) -> None:
        """Report that a stage of the latest search has come."""
        of_stage = stage.model_dump(exclude={"elapsed_ms"})
        elapsed_ms, search = self._elapsed_ms(), self._num_searches
        self._report(SearchAdvanced(elapsed_ms=elapsed_ms, search=search, **of_stage))

    def prefill_changed(self, outcome: PrefillStep, num_tokens: int) -> None:
        """Report what becomes of a guess."""
        elapsed_ms = self._elapsed_ms()
        self._report(GuessChanged(elapsed_ms=elapsed_ms, outcome=outcome, tokens=num_tokens))

    def prompt_planned(
        self, plan: ExplainedPlan, parts: Iterable[PromptPart], num_tokens: int
    ) -> None:
        """Report the plan of a prompt. Call it only after the last search has ended."""
        planned = [
            PlannedPart(
                chunk=part.chunk,
                tokens=part.end - part.start,
                planned=part.decision.action.value,
                reason=part.decision.reason.value,
            )
            for part in parts
            if part.decision is not None
        ]
        self._report(
            PromptPlanned(
                elapsed_ms=self._elapsed_ms(),
                engine=plan.engine,
                prompt_tokens=num_tokens,
                parts=planned,
                predicted_ms=plan.predicted_ms,
            )
        )

    def engine_accepted(self, address: str) -> None:
        """Report that an engine has accepted the request."""
        self._report(EngineAccepted(elapsed_ms=self._elapsed_ms(), engine=address))

    def first_token(self) -> None:
        """Report that the first token has come, and nothing after it."""
        self._report(FirstTokenArrived(elapsed_ms=self._elapsed_ms()))
        self.end()

    @property
    def is_reported(self) -> bool:
        """Whether a client gets the events."""
        return self._listener is not None

    def _elapsed_ms(self) -> float:
        return to_ms(time.perf_counter() - self._started_s)

    def _report(self, event: AnyStageEvent) -> None:
        if self._listener is not None and self._num_left > 0:
            self._num_left -= 1
            self._listener(event)


NO_PROGRESS: Final = Progress()
"""For questions whose clients want no events."""
