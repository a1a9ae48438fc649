"""Measures the times of a real engine, and compares a simulated engine that has them with it."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.open_loop import Answered, ask, poisson_times
from ragcache_core.plan.reuse_plan import NO_REUSE
from ragcache_gateway.engines.engine_load import profile_of
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.watched.signing_keys import SigningKeys

BLOCK_TOKENS: Final = 128
"""Of vLLM on a CPU."""

LOAD: Final = 0.5
_DECODED, _TOGETHER, _TRIES = 32, 8, 5
_PATH: Final = "/v1/completions"
_EARLY_S: Final = 0.2
_SHORT_TOKENS, _SHARED_TOKENS, _OWN_TOKENS = 8, 512, (64, 1024)
_VOCABULARY = range(300, 2000)


@dataclass(frozen=True, slots=True)
class EngineRequests:
    """Requests to an engine itself, with their times in seconds."""

    bodies: Sequence[dict[str, Any]]
    times: Sequence[float]

    async def ask(self, port: int, keys: SigningKeys) -> list[Answered]:
        """Ask all at their times, as a peer of the engine."""
        began_s, tokens = time.monotonic(), PeerTokens(keys)

        async def ask_one(body: dict[str, Any], at_s: float) -> Answered:
            # A token is made shortly before it is sent.
            await asyncio.sleep(began_s + at_s - time.monotonic() - _EARLY_S)
            return await ask(port, _PATH, body, began_s + at_s, dict(tokens.metadata(_PATH)))

        return list(await asyncio.gather(*map(ask_one, self.bodies, self.times)))


def _body(token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "kv_transfer_params": {"ragcache": NO_REUSE},
    }


async def measured_times(
    port: int, records: str, cache_tokens: int, keys: SigningKeys
) -> EngineTimes:
    """Return the times of an idle engine: its own profile, and decodes as they are measured.

    Loads are not measured, so they take no time.
    """
    client = EngineClient(records, Credentials(keys))
    try:
        profile = profile_of((await client.costs()).prefill)
    finally:
        await client.close()
    if profile is None:
        raise RuntimeError("the engine has no prefill profile")
    rng = random.Random(0)

    async def step_s(together: int) -> tuple[float, float]:
        """Return the times of a decode step and to the first token, with requests at once."""
        prompts = [rng.choices(_VOCABULARY, k=_SHORT_TOKENS) for _ in range(together)]
        bodies = [_body(prompt, _DECODED) for prompt in prompts]
        found = await EngineRequests(bodies, [0.0] * together).ask(port, keys)
        steps = [(one.total_s - one.first_s) / (_DECODED - 1) for one in found]
        return statistics.median(steps), min(one.first_s for one in found)

    await step_s(1)  # warm
    alone = [await step_s(1) for _ in range(_TRIES)]
    together = [await step_s(_TOGETHER) for _ in range(_TRIES)]
    alone_s, first_s = (statistics.median(values) for values in zip(*alone, strict=True))
    together_s = statistics.median(step for step, _ in together)
    token_s = max(0.0, (together_s - alone_s) / (_TOGETHER - 1))
    return EngineTimes(
        profile,
        accept_s=max(0.0, first_s - alone_s),
        decode_s=max(1e-4, alone_s - token_s),
        decode_token_s=token_s,
        context_token_s=0.0,
        load_s=0.0,
        load_token_s=0.0,
        block_tokens=BLOCK_TOKENS,
        cache_tokens=cache_tokens,
    )


def engine_requests(times: EngineTimes, count: int, seed: int) -> EngineRequests:
    """Return requests, some with the same beginning, at half the rate that the engine can serve."""
    rng = random.Random(seed)
    heads = [rng.choices(_VOCABULARY, k=_SHARED_TOKENS) for _ in range(4)]
    bodies, work_s = [], 0.0
    for _ in range(count):
        own = rng.choices(_VOCABULARY, k=rng.randint(*_OWN_TOKENS))
        bodies.append(_body(rng.choice(heads) + own, 8))
        work_s += times.profile.predict(_SHARED_TOKENS // 2, len(own)) + 8 * times.decode_token_s
    return EngineRequests(bodies, poisson_times(count, LOAD * count / work_s, seed))


def simulation_errors(real: Sequence[Answered], simulated: Sequence[Answered]) -> list[float]:
    """Return by what share each simulated time to the first token is off the real one."""
    return [
        abs(guess.first_s - one.first_s) / one.first_s
        for one, guess in zip(real, simulated, strict=True)
        if not (one.error or guess.error)
    ]
