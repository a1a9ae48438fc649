"""``python -m ragcache_gateway``: serve until stopped."""

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


def main() -> int:
    """Run the gateway; the exit status says whether its configuration was good."""
    try:
        config = GatewaySettings()
        _log_to_stderr(config.log_level)
        server = build_server(config)
    except InvalidInput as error:
        print(f"ragcache_gateway: {error}", file=sys.stderr)
        return 2
    # After its clean stop uvicorn raises the signal again; by then it has done its work.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run()
    return 0 if server.started else 1


def build_server(config: GatewaySettings) -> uvicorn.Server:
    """A server that is ready to run. Raises InvalidInput for a model that cannot be served."""
    folder = load_model_folder(config.model)
    prompts = PromptBuilder(
        load_tokenizer(folder.path),
        max_model_len=config.max_model_len,
        default_max_tokens=config.default_max_tokens,
        cache_bytes=config.token_cache_bytes,
    )
    try:
        prompts.frame(Conversation("x", (), "x"))
    except InvalidInput as error:
        # Found out now, and not by the first question.
        raise InvalidInput(
            "RAGCACHE_MODEL",
            f"cannot hold documents: {error.problem}",
            "name a model whose chat template takes a system message",
        ) from error
    app = create_app(config, folder.space(config.model_dtype), prompts)
    host, port = split_address(config.listen)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            # gRPC's asyncio and what an environment happens to hold must not decide the loop.
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=config.stop_grace_s,
        )
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # One line for every request to the engine says nothing that ours do not.
    logging.getLogger("httpx").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
