"""LMCache's own store, by the client and the message classes of LMCache's own benchmark."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contestants.contestant import Contestant, lmcache_server

_TOKENS = 256
"""Tokens of the one chunk that a value of the multi-process server has."""

_BLOCKS = 16
_MOST_PUTS = 64


class MultiProcess(Contestant):
    """``lmcache server``, with which engines share memory, by the client of its own benchmark.

    A value is one chunk, in one block of one layer of the caller's paged KV. Only STORE and
    RETRIEVE are timed; the LOOKUP that every RETRIEVE needs before it is not.
    """

    def __init__(self, folder: Path) -> None:
        from lmcache.cli.commands.bench.server_bench import helpers  # noqa: PLC0415
        from lmcache.cli.commands.bench.server_bench.client import (  # noqa: PLC0415
            ServerBenchClient,
        )
        from lmcache.cli.commands.bench.server_bench.config import (  # noqa: PLC0415
            BenchConfig,
        )

        self._server = lmcache_server(memory_gb=1)
        self._config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{self._server.port}",
            http_url=f"http://127.0.0.1:{self._server.http_port}",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=True,
            num_tokens=_TOKENS - 1,
            kvcache_shape_spec="",
            num_blocks=_BLOCKS,
            block_size=_TOKENS,
        )
        self._make, self._helpers = ServerBenchClient, helpers
        self._client: Any = None
        self._value_bytes = 0
        self._puts: Counter[int] = Counter()
        self._sessions = itertools.count()

    def prepare_put(self, number: int, value: memoryview) -> None:
        if len(value) != self._value_bytes:
            self._start(len(value))
        self._puts[number] += 1
        self._request = self._request_of(number)
        self._block()[:] = value

    def put(self, number: int, value: memoryview) -> None:
        # What is stored is not stored again: other bytes are another chunk.
        if not self._client.store(self._request, 0, _TOKENS).succeeded:
            raise OSError("lmcache refused a store")

    def prepare_get(self, number: int) -> None:
        """Do the LOOKUP, whose end its own benchmark looks for every 50 ms."""
        helpers, client = self._helpers, self._client
        self._request = self._request_of(number)
        key = helpers._make_key(
            self._request.token_ids,
            self._request.request_id,
            end=self._request.num_full_tokens,
            world_size=client._kv_world_size,
        )
        helpers._send_lookup(client._req_client, key)
        helpers._poll_prefetch_status(client._req_client, key.request_id, 5000, 0.001)

    def get(self, number: int, buffer: memoryview) -> memoryview:
        if not self._client.retrieve(self._request, 0, _TOKENS).succeeded:
            raise OSError("lmcache retrieved nothing")
        return self._block()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._server.end()

    def _start(self, value_bytes: int) -> None:
        if self._client is not None:
            self._client.close()
        self._value_bytes = value_bytes
        spec = f"(1,{_BLOCKS},{_TOKENS},1,{value_bytes // _TOKENS}):uint8:1"
        self._client = self._make(replace(self._config, kvcache_shape_spec=spec), lambda _: None)
        self._client.start()
        [self._layer] = self._client._workers[0].kv_caches.values()

    def _request_of(self, number: int) -> Any:
        sequence = number * _MOST_PUTS + self._puts[number]
        return self._client.create_request(sequence, f"{next(self._sessions)}", "bench")

    def _block(self) -> memoryview:
        block = self._layer[self._request.block_offset]
        return memoryview(block.view(-1).numpy()).cast("B")
