"""The limit on the time between tokens, and which engines keep it with one more answer."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_wire.settings import GatewaySettings


class DecodeLimit:
    """Compares engines with ``spec.gateway.slo.nextTokenMilliseconds``. For one event loop.

    Attributes:
        seconds: The limit. None: there is none.
    """

    def __init__(self, settings: GatewaySettings, loads: EngineLoads) -> None:
        limit_ms = settings.slo_next_token_ms
        self.seconds = None if limit_ms is None else limit_ms / 1e3
        self._loads = loads

    def num_decoding(self, engine: Engine) -> int:
        """Return the number of answers that an engine generates now."""
        return self._loads.load(engine).num_decoding

    def next_token_s(self, engine: Engine) -> float | None:
        """Return the predicted seconds between tokens if an engine gets one more answer.

        None: there is no limit, it is not known, or the engine has nothing to do. Such an engine is
        not refused, so that a new measurement can correct an old one.
        """
        number = self._num_later(engine)
        return engine.pace.token_s(number + 1) if number else None

    def wait_s(self, engine: Engine) -> float:
        """Return when an engine keeps the limit with one more answer; 0: now, or never."""
        if self.seconds is None:
            return 0.0
        return engine.pace.wait_s(self._num_later(engine), self.seconds)

    def with_room(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return the engines that keep the limit with one more answer; all of them if none does."""
        return [engine for engine in engines if self._has_room(engine)] or list(engines)

    def _num_later(self, engine: Engine) -> float:
        """Return how many answers an engine generates when a new request could begin."""
        if self.seconds is None:
            return 0.0
        load = self._loads.load(engine)
        return engine.pace.num_after(load.num_decoding, load.num_pending, load.pending_s)

    def _has_room(self, engine: Engine) -> bool:
        token_s = self.next_token_s(engine)
        return token_s is None or self.seconds is None or token_s <= self.seconds
