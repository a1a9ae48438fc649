"""``python -m ragcache_gateway``: serves until it is stopped."""

from __future__ import annotations

import logging
import signal
import sys

import uvicorn

from ragcache_core.errors import InvalidInput
from ragcache_gateway.app import create_app
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.field_types import split_address

SWITCH_INTERVAL_S = 0.001
"""Time after which a thread passes Python's lock on. The event loop waits for it while a thread
builds a prompt, so Python's default of 5 ms would delay all streams."""


def main() -> int:
    """Run the gateway. The exit status is 2 if its settings are wrong."""
    try:
        settings = GatewaySettings()
        _log_to_stderr(settings.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        server = build_server(settings)
    except InvalidInput as error:
        print(f"ragcache_gateway: {error}", file=sys.stderr)
        return 2
    # After a clean stop uvicorn raises the signal again, which would end the process with an error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run()
    return 0 if server.started else 1


def build_server(settings: GatewaySettings) -> uvicorn.Server:
    """Build a server that is ready to run. Raises InvalidInput for a model it cannot serve."""
    folder = load_model_folder(settings.model)
    prompts = PromptBuilder(
        load_tokenizer(folder.path),
        max_model_len=settings.max_model_len,
        default_max_tokens=settings.default_max_tokens,
        cache_bytes=settings.token_cache_bytes,
    )
    try:
        prompts.frame(Conversation("x", (), "x"))
    except InvalidInput as error:
        # The first question must not be the one to find this out.
        raise InvalidInput(
            "RAGCACHE_MODEL",
            f"cannot hold documents: {error.problem}",
            "name a model whose chat template takes a system message",
        ) from error
    app = create_app(settings, folder.space(settings.model_dtype), prompts)
    host, port = split_address(settings.listen)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            # Neither gRPC nor an installed package may choose the event loop.
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.stop_grace_s,
        )
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # The gateway logs requests itself.
    logging.getLogger("httpx").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
