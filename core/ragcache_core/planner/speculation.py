"""Decides when an engine computes the prompt of a search that has not ended.

Each stage of a search names candidates. The gateway may have an engine compute the prompt that they
would give: a guess. If the final stage has the same candidates, the engine has the prompt's KV when
the search ends.

RAGCache starts a guess if the candidates have changed and fewer requests wait for their prefill
than fit into one pass. Here a guess must also be expected to save more time than it wastes. The
retriever states how probable it is that a stage is the final one. A right guess saves the
computation that overlaps with the rest of the search. It has a low priority, so it begins when no
other request waits. A wrong one delays the other requests of the engine by its own computation, and
delays its own question until the running pass ends.

Source: RAGCache section 5.3, Algorithm 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

LEAST_SAVING_S = 0.01
"""A guess saves more than this: about the time of the gateway and the engine for one request."""


class Decision(Enum):
    """What to do with the guess of a stage."""

    NOTHING = "nothing"
    """No guess is running, and none starts."""
    START = "start"
    KEEP = "keep"
    """The running guess has the candidates of this stage."""
    REPLACE = "replace"
    """Cancel the running guess and start another one. What both have in common stays cached."""
    CANCEL = "cancel"
    """Cancel the running guess: its candidates have changed, and no other guess is beneficial."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do beside a question, of all gateways.

    Attributes:
        num_pending: Requests that have no first token yet, guesses included.
        num_decoding: Requests whose answers it generates.
        queue_s: Predicted seconds until all pending requests have their first token.
    """

    num_pending: int
    num_decoding: int
    queue_s: float

    @property
    def num_delayed(self) -> int:
        """How many requests a prefill would delay."""
        return self.num_pending + self.num_decoding


@dataclass(frozen=True, slots=True)
class GuessCost:
    """What an engine computes for a guess.

    Attributes:
        uncached_tokens: Tokens of the prompt that the engine has to compute.
        prefill_s: Predicted time for them in an engine without other work.
        again_s: Predicted time from the question's own request to its first token, if the engine
            has computed the guess.
        step_s: Longest time of one pass. An abort takes effect at the end of a pass.
        pass_tokens: Most tokens of one pass.
    """

    uncached_tokens: int
    prefill_s: float
    again_s: float
    step_s: float
    pass_tokens: int

    @property
    def max_prefill_requests(self) -> int:
        """Return how many such prefills fit into one pass, at least 1 (max_prefill_bs)."""
        return max(1, self.pass_tokens // max(1, self.uncached_tokens))


def may_be_beneficial(final_probability: float, load: Load) -> bool:
    """Return whether a guess can be beneficial, before anything is known of its prompt.

    A guess that passes may still waste more than it saves (``net_saving_s``).
    """
    return final_probability > (1.0 - final_probability) * load.num_delayed


def net_saving_s(
    final_probability: float, remaining_s: float, cost: GuessCost, load: Load
) -> float:
    """Return the expected saving of a guess minus its expected waste, in seconds.

    Args:
        final_probability: That the final stage has the guess's candidates, in [0, 1].
        remaining_s: Expected time to the end of the search.
    """
    available_s = remaining_s - load.queue_s
    overlap_s = max(0.0, min(cost.prefill_s, available_s))
    saved_s = overlap_s - cost.again_s
    delay_s = min(cost.step_s, cost.prefill_s) / 2
    wasted_s = delay_s + load.num_delayed * overlap_s
    return final_probability * saved_s - (1.0 - final_probability) * wasted_s


def is_beneficial(
    final_probability: float, remaining_s: float, cost: GuessCost, load: Load
) -> bool:
    """Return whether a guess should start. The arguments are those of ``net_saving_s``."""
    if load.num_pending >= cost.max_prefill_requests:
        return False
    return net_saving_s(final_probability, remaining_s, cost, load) > LEAST_SAVING_S


def saved_s(cost: GuessCost, num_computed: int) -> float:
    """Return the predicted time that a confirmed guess has saved, in seconds.

    Args:
        num_computed: Tokens that the engine computed for it before the search ended.
    """
    if cost.uncached_tokens <= 0:
        return 0.0
    share = min(1.0, num_computed / cost.uncached_tokens)
    return max(0.0, share * cost.prefill_s - cost.again_s)


def decide(*, is_running: bool, has_changed: bool, is_beneficial: bool) -> Decision:
    """Decide at a stage.

    Args:
        is_running: Whether an earlier stage's guess was started and not cancelled.
        has_changed: Whether that guess has other candidates than this stage.
        is_beneficial: Whether a guess with this stage's candidates should start.
    """
    if is_running and not has_changed:
        return Decision.KEEP
    if is_beneficial:
        return Decision.REPLACE if is_running else Decision.START
    return Decision.CANCEL if is_running else Decision.NOTHING


def remaining_search_s(progress: float, search_s: float, elapsed_s: float, usual_s: float) -> float:
    """Return the expected time to the end of a search.

    Args:
        progress: Finished share of the scan, in [0, 1].
        search_s: Time of the scan up to this stage.
        elapsed_s: Time since the search was requested.
        usual_s: Time of whole searches lately; 0: unknown. It has what follows the scan, such as
            ranking the hits again.
    """
    scan_s = search_s * (1.0 - progress) / progress if progress > 0 else 0.0
    return max(scan_s, usual_s - elapsed_s, 0.0)


def computed_tokens(cost: GuessCost, elapsed_s: float) -> int:
    """Return how many tokens an engine is expected to compute for a guess that is aborted.

    The running pass is computed to its end.

    Args:
        elapsed_s: Time since the guess was sent.
    """
    if cost.prefill_s <= 0:
        return cost.uncached_tokens
    share = min(1.0, max(0.0, elapsed_s) / cost.prefill_s)
    num_passes = math.ceil(share * cost.uncached_tokens / cost.pass_tokens)
    return min(cost.uncached_tokens, num_passes * cost.pass_tokens)
