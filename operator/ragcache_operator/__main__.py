"""``python -m ragcache_operator``: run the operator with the settings of its environment."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from contextlib import AsyncExitStack
from functools import partial

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.config import OperatorConfig
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.lease import LeaseClaim, LeaseLost, run_while_leading
from ragcache_operator.metrics import Metrics, serving_health
from ragcache_operator.reconcile.leader import reconcile_all


async def serve(config: OperatorConfig) -> None:
    """Run until cancelled. Raises RagCacheError for failures that a restart may solve."""
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving_health(config.listen_port, metrics))
        api = await stack.enter_async_context(await Api.connect())
        work = partial(reconcile_all, api, config, metrics)
        if config.lease:
            identity = f"{config.identity}_{uuid.uuid4().hex[:8]}"
            await run_while_leading(api, LeaseClaim(config.namespace, config.lease, identity), work)
        else:
            await work()


async def until_signalled(config: OperatorConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order and release the Lease."""
    serving = asyncio.create_task(serve(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # While this replica leads, Kopf replaces these handlers and ends on a signal.
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except LeaseLost as error:
        # Exit immediately, because a running task would work at the same time as the next holder.
        print(f"ragcache_operator: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("operator: stopped before it led")


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        config = OperatorConfig.from_environment(os.environ)
        logging.basicConfig(
            level=config.log_level,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        asyncio.run(until_signalled(config))
    except InvalidInput as error:
        print(f"ragcache_operator: {error}", file=sys.stderr)
        return 2
    except RagCacheError as error:
        # A restart may solve this failure, and a traceback does not help the user.
        print(f"ragcache_operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
