"""Measures how long the gateway's event loop stands still for a question with a long prompt.

All streams of a gateway run in its event loop, so a token of another answer waits as long. The real
gateway serves one question after the other, whose history fills the model's context. A task in the
same event loop notes the delay of its wake-ups. Retriever, cache store and engine are
stand-ins that do next to nothing; the engine does not read the prompt.

- ``longest_loop_cpu_ms``: the most CPU time that the event loop used between two wake-ups of the
  task, as the median over all questions. Other programs on the same cores hardly change it.
- ``longest_stall_ms``: the longest delay of the task's wake-up, waits for Python's lock
  included. It is the least over all questions, because it includes waits for a core too.
- ``idle_stall_ms``: the same over as long a time without a question.
- ``first_token_ms``: from the request to the answer, as the median over all questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from ragcache_gateway import __main__ as gateway_main
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.helpers.gateway_fakes import CONFIG, MODEL, FakeEngine, World
from tests.helpers.tiny_model import make_tiny_model

PROMPT_TOKENS = 131_072
TURNS = 32
BEAT_S = 0.0005
WORDS = ("The service runs in region north", "and the team answers alerts.")


class SilentEngine:
    """An engine that answers one word to any prompt, which it does not read."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        event = {"choices": [{"text": "x", "finish_reason": "stop"}]}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer questions")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="about, in a prompt")
    arguments = parser.parse_args()
    # As the gateway's process sets it.
    sys.setswitchinterval(getattr(gateway_main, "SWITCH_INTERVAL_S", sys.getswitchinterval()))
    questions = 8 if arguments.quick else 40
    print(json.dumps(asyncio.run(measure(arguments.tokens, questions))))


async def measure(num_tokens: int, questions: int) -> dict[str, float]:
    """Ask questions one after the other, and note the stalls of the event loop."""
    stalls_ms, cpus_ms, idle_ms, times_ms = [], [], [], []
    prompt_tokens = 0
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_model(folder)
        key_file = folder / "keys"
        key_file.write_text("ab" * 32)
        config = CONFIG.replace(
            max_model_len=2 * num_tokens, signing_key_file=SigningKeys(key_file)
        )
        world = World(config, engine=cast(FakeEngine, SilentEngine()))
        gateway = await world.start(stack, model)
        body = question(world, num_tokens)
        for number in range(questions + 1):
            with stalls() as found:
                began_s = time.perf_counter()
                reply = await gateway.client.post(
                    "/v1/chat/completions",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
                took_s = time.perf_counter() - began_s
                await asyncio.sleep(2 * BEAT_S)
            reply.raise_for_status()
            with stalls() as quiet:
                await asyncio.sleep(took_s)
            if number:  # the first one loads modules
                stalls_ms.append(max(stall.delay_s for stall in found) * 1e3)
                cpus_ms.append(max(stall.cpu_s for stall in found) * 1e3)
                idle_ms.append(max(stall.delay_s for stall in quiet) * 1e3)
                times_ms.append(took_s * 1e3)
        prompt_tokens = count_tokens(world, num_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "questions": questions,
        "longest_loop_cpu_ms": round(statistics.median(cpus_ms), 1),
        "longest_stall_ms": round(min(stalls_ms), 1),
        "idle_stall_ms": round(min(idle_ms), 1),
        "first_token_ms": round(statistics.median(times_ms), 1),
    }


@dataclass(frozen=True, slots=True)
class Stall:
    """Delays of a task's wake-ups in seconds, and CPU time of the event loop meanwhile."""

    delay_s: float
    cpu_s: float


@contextmanager
def stalls() -> Iterator[list[Stall]]:
    """Note how late a task of the event loop wakes up, until the end."""
    found: list[Stall] = []

    async def beat() -> None:
        while True:
            wanted_s, cpu_s = time.perf_counter() + BEAT_S, time.thread_time()
            await asyncio.sleep(BEAT_S)
            found.append(Stall(time.perf_counter() - wanted_s, time.thread_time() - cpu_s))

    task = asyncio.get_running_loop().create_task(beat())
    try:
        yield found
    finally:
        task.cancel()


def history(world: World, num_tokens: int) -> list[dict[str, str]]:
    """Return turns that have about a number of tokens together."""
    prompts = world.prompts()
    sentence = " ".join(WORDS)
    sentence_tokens = len(prompts.encode_chunk(f"{sentence} " * 100)) / 100
    text = f"{sentence} " * int(num_tokens / sentence_tokens / TURNS)
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(TURNS)]


def question(world: World, num_tokens: int) -> bytes:
    """Return the body of a request with a long history."""
    messages = [*history(world, num_tokens), {"role": "user", "content": "Where does it run?"}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8}).encode()


def count_tokens(world: World, num_tokens: int) -> int:
    """Return the tokens of the history."""
    prompts = world.prompts()
    return sum(len(prompts.encode_chunk(turn["content"])) for turn in history(world, num_tokens))


if __name__ == "__main__":
    main()
