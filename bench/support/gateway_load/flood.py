"""Many connections that ask a gateway for answers and ignore ``Retry-After``.

Each connection sends its next request as soon as it has a response, also a refusal, and
connects again if the gateway closes it. Run it as a program: ``python -m
bench.support.gateway_load.flood PORT CONNECTIONS SECONDS FILE``. The file has the bytes of one
request. It prints the number of responses by status as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path

import uvloop

from bench.support.gateway_load.simulated_parts import HOST, AnswerClient

RECONNECT_S = 0.1


async def flood(port: int, num_connections: int, seconds: float, request: bytes) -> Counter[str]:
    """Ask over all connections until the time is over. Return the responses by status."""
    found: Counter[str] = Counter()

    async def one_connection() -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RECONNECT_S * random.random())
            try:
                _, client = await loop.create_connection(lambda: AnswerClient(request), HOST, port)
            except OSError:
                found["refused connection"] += 1
                continue
            while (status := await client.ask()) is not None:
                found[str(status)] += 1
            found["closed"] += 1

    tasks = [asyncio.create_task(one_connection()) for _ in range(num_connections)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


if __name__ == "__main__":
    port, num_connections, seconds, file = sys.argv[1:]
    content = Path(file).read_bytes()
    counts = uvloop.run(flood(int(port), int(num_connections), float(seconds), content))
    print(json.dumps(counts))
