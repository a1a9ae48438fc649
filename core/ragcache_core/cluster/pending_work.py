"""What an engine has to do: the queue that it publishes to all gateways.

A question waits for the loads and the prefills of all requests before it, minus what is already
computed. It does not wait for background requests, whose priority is lower, except for the pass
that computes one of them now.

Source: Mooncake section 6.1, Algorithm 1, T_queue.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do at one time.

    Attributes:
        pending_s: Predicted seconds of the loads and prefills of questions. The running pass of a
            background request counts, too.
        background_s: The rest of the loads and prefills of background requests.
        num_pending: Requests without a first token that are not of the background.
        num_background: Background requests without a first token.
        num_decoding: Requests whose answers it generates.
        free_tokens: Tokens of KV that its cache can take without preempting a request. None: not
            known.
        begun_s: The part of ``pending_s`` that a request of any priority waits for: prefills
            that have begun, and the running pass of the background.
    """

    pending_s: float = 0.0
    background_s: float = 0.0
    num_pending: int = 0
    num_background: int = 0
    num_decoding: int = 0
    free_tokens: int | None = None
    begun_s: float = 0.0

    def aged(self, seconds: float) -> EngineLoad:
        """Return the load after some seconds, if the engine has worked as predicted."""
        left_s = self.pending_s - seconds
        return EngineLoad(
            max(0.0, left_s),
            max(0.0, self.background_s + min(0.0, left_s)),
            self.num_pending,
            self.num_background,
            self.num_decoding,
            self.free_tokens,
            max(0.0, self.begun_s - seconds),
        )

    def before_s(self, share: float) -> float:
        """Return the seconds that a request waits.

        Args:
            share: Of what has not begun, that goes before the request.
        """
        return self.begun_s + share * max(0.0, self.pending_s - self.begun_s)


@dataclass(slots=True)
class _Request:
    """A request. ``left_s``: seconds of its prefill, and of a load that has not begun."""

    num_tokens: int
    is_background: bool
    left_s: float


class PendingWork:
    """The requests of one engine, by their ids. Ids that are not known are ignored.

    Every change takes the same time however many requests there are. Times are seconds on one
    clock.
    """

    def __init__(self) -> None:
        self._pending: dict[str, _Request] = {}
        self._decoding: dict[str, _Request] = {}
        self._load_ends: dict[str, float] = {}  # of loads that run
        self._begun: set[str] = set()  # questions whose prompts a pass has begun
        # By whether a request is of the background.
        self._left_s = {False: 0.0, True: 0.0}
        self._num_background = 0
        self._background_pass_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        """Tell whether a request has no first token."""
        return request_id in self._pending

    def accept(
        self, request_id: str, num_tokens: int, seconds: float, *, is_background: bool
    ) -> None:
        """Add a request.

        Args:
            num_tokens: Length of its prompt.
            seconds: Predicted, of its load and its prefill.
        """
        self.end(request_id)
        self._add(request_id, _Request(num_tokens, is_background, seconds))

    def predict(self, request_id: str, seconds: float) -> None:
        """Replace the predicted seconds of a request's load and prefill."""
        if (request := self._pending.get(request_id)) is not None:
            self._left_s[request.is_background] += seconds - request.left_s
            request.left_s = seconds

    def begin_load(self, request_id: str, load_s: float, after_s: float, now_s: float) -> None:
        """Record that the load of a request begins.

        Args:
            load_s: Predicted seconds of the load.
            after_s: Predicted seconds of what is to compute after it.
        """
        if request_id in self._pending:
            self.predict(request_id, after_s)
            self._load_ends[request_id] = now_s + load_s

    def end_load(self, request_id: str) -> None:
        """Record that the load of a request has ended."""
        self._load_ends.pop(request_id, None)

    def begin_step(self) -> bool:
        """Forget what the last pass computed of background requests. Return whether it did."""
        before_s, self._background_pass_s = self._background_pass_s, 0.0
        return before_s > 0

    def num_tokens(self, request_id: str) -> int:
        """Return the length of a request's prompt; 0: the request is not known."""
        request = self._pending.get(request_id) or self._decoding.get(request_id)
        return request.num_tokens if request is not None else 0

    def compute(self, request_id: str, left_s: float | None, pass_s: float) -> None:
        """Record that the pass that begins computes tokens of a request's prompt.

        Args:
            left_s: Predicted seconds of what is not computed yet, this pass included. None: not
                known, so the last prediction holds.
            pass_s: Predicted seconds of this pass.
        """
        if left_s is not None:
            self.predict(request_id, left_s)
        request = self._pending.get(request_id)
        if request is None:
            return
        if request.is_background:
            self._background_pass_s += min(pass_s, request.left_s)
        else:
            self._begun.add(request_id)

    def decode(self, request_id: str) -> None:
        """Record that the prompt of a request is computed."""
        if (request := self._remove(request_id)) is not None:
            request.left_s = 0.0
            self._decoding[request_id] = request

    def restart(self, request_id: str, seconds: float) -> None:
        """Record that a request was preempted and needs its prefill again, of so many seconds."""
        if (request := self._decoding.pop(request_id, None)) is not None:
            request.left_s = seconds
            self._add(request_id, request)
        else:
            self.predict(request_id, seconds)
            self._begun.discard(request_id)

    def end(self, request_id: str) -> None:
        """Record that a request has ended."""
        self._remove(request_id)
        self._decoding.pop(request_id, None)

    def load(self, now_s: float, free_tokens: int | None = None) -> EngineLoad:
        """Return what the engine has to do now."""
        loads_s = {False: 0.0, True: 0.0}
        for request_id, ends_s in self._load_ends.items():
            is_background = self._pending[request_id].is_background
            loads_s[is_background] += max(0.0, ends_s - now_s)
        pass_s = self._background_pass_s
        pending_s = max(0.0, self._left_s[False] + loads_s[False] + pass_s)
        return EngineLoad(
            pending_s=pending_s,
            background_s=max(0.0, self._left_s[True] + loads_s[True] - pass_s),
            num_pending=len(self._pending) - self._num_background,
            num_background=self._num_background,
            num_decoding=len(self._decoding),
            free_tokens=free_tokens,
            begun_s=min(pending_s, sum(self._pending[one].left_s for one in self._begun) + pass_s),
        )

    def _add(self, request_id: str, request: _Request) -> None:
        self._pending[request_id] = request
        self._left_s[request.is_background] += request.left_s
        self._num_background += request.is_background

    def _remove(self, request_id: str) -> _Request | None:
        request = self._pending.pop(request_id, None)
        if request is None:
            return None
        self._load_ends.pop(request_id, None)
        self._begun.discard(request_id)
        self._num_background -= request.is_background
        self._left_s[request.is_background] -= request.left_s
        if not self._pending:
            self._left_s = {False: 0.0, True: 0.0}  # without what rounding has left
        return request
