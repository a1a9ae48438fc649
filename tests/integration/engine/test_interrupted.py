"""Loads and recomputations during which the store dies or the client disconnects.

The connection to the store stalls, and a recomputation takes so many steps that it cannot end.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.completion import complete, is_clear
from harness.plans import blend_for_all, exact_for_all
from harness.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from tests.integration.engine.test_blend import LENGTHS, TEMPLATE_TOKENS, make_blend_prompt
from tests.integration.engine.test_vllm import Platform
from tests.kit.engine import samples, total
from tests.kit.wait import wait_until

HOST = "127.0.0.2"
"""Another address of this machine. A store names the port of its transport but no host.

A relay of the same ports at this address therefore carries the whole traffic.
"""

READ_BYTES = 1 << 16


class StallingConnection:
    """A relay of a store's ports at HOST, on its own threads.

    The store must offer no transport but TCP.
    """

    def __init__(self, store: str) -> None:
        """Connect to the store at address "host:port"."""
        host, port = store.rsplit(":", 1)
        client = StoreClient(store)
        client.connect(30)
        assert client.hello is not None
        assert client.transport == "socket"
        data_port = client.hello.data_port
        client.close()
        self.address = f"{HOST}:{port}"
        self._changed = threading.Condition()
        self._may_pass: int | None = None
        self._stalls = 0
        self._stalled: set[socket.socket] = set()
        self._connections: set[socket.socket] = set()
        self._listeners = [
            self._listen((host, int(port)), self._pass),
            self._listen((host, data_port), self._pass_or_stall),
        ]

    @classmethod
    @contextlib.contextmanager
    def to(cls, store: str) -> Iterator[StallingConnection]:
        """Yield a relay that at first lets everything through."""
        relay = cls(store)
        try:
            yield relay
        finally:
            relay.resume()
            relay.cut()
            for listener in relay._listeners:
                listener.close()

    def stall(self, after_bytes: int) -> None:
        """Let only after_bytes more bytes of values pass on each connection."""
        with self._changed:
            self._stalls += 1
            self._may_pass = after_bytes

    def wait_until_stalled(self, connections: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until the store has sent more than may pass on so many connections."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._stalled) >= connections, timeout_s)

    @property
    def stalled(self) -> int:
        """Return the number of stalled connections."""
        with self._changed:
            return len(self._stalled)

    def resume(self) -> None:
        """Let everything pass."""
        with self._changed:
            self._may_pass = None
            self._changed.notify_all()

    def cut(self) -> None:
        """Close every connection, as the end of the store would. Stalled bytes are lost."""
        with self._changed:
            connections, self._connections = self._connections, set()
            self._changed.notify_all()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(
        self,
        target: tuple[str, int],
        down: Callable[[socket.socket, socket.socket], None],
    ) -> socket.socket:
        listener = socket.create_server((HOST, target[1]), backlog=64)

        def relay(here: socket.socket) -> None:
            with here, contextlib.suppress(OSError), socket.create_connection(target) as there:
                with self._changed:
                    self._connections |= {here, there}
                up = threading.Thread(target=self._pass, args=[here, there], daemon=True)
                up.start()
                down(there, here)
                up.join()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    here, _ = listener.accept()
                    threading.Thread(target=relay, args=[here], daemon=True).start()

        threading.Thread(target=accept, name="relay", daemon=True).start()
        return listener

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_or_stall(self, source: socket.socket, target: socket.socket) -> None:
        stall = passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                with self._changed:
                    if self._stalls != stall:
                        stall, passed = self._stalls, 0
                    room = len(data) if self._may_pass is None else self._may_pass - passed
                passed += len(data)
                target.sendall(data[:room])
                if room < len(data) and not self._wait_for_resume(target):
                    break
                target.sendall(data[room:])
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for_resume(self, target: socket.socket) -> bool:
        """Wait until the relay resumes. Return False if the connection was closed."""
        with self._changed:
            self._stalled.add(target)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._may_pass is None or target not in self._connections
            )
            self._stalled.discard(target)
            return target in self._connections


pytestmark = pytest.mark.timeout(900)

WAIT_S = 60.0
ANSWER_S = 400.0
"""An answer may come after hundreds of steps."""
BLOCK = 128
TOKEN_BYTES = 4 * 2 * 2 * 32 * 2
"""Layers, keys and values, KV heads, head_dim, bytes of bfloat16."""

# The template, the first chunk and a part of the second one arrive.
STALL_BYTES = (TEMPLATE_TOKENS + LENGTHS[0]) * TOKEN_BYTES + LENGTHS[1] * TOKEN_BYTES // 2

STORE_UNAVAILABLE = "store unavailable"


@dataclass
class Interrupted(Platform):
    """Next to a decoding request, a recomputation gets one token per step."""

    connection: StallingConnection

    def failed(self, reason: str) -> float:
        """Return how many loads failed for a reason."""
        return total(samples(self.engine.url, "ragcache_engine_load_failures_total", reason=reason))

    def recomputations(self) -> float:
        """Return how many recomputations have ended, with or without success."""
        return total(self.metrics("ragcache_engine_recompute_seconds_count"))

    def blocks_are_free(self) -> bool:
        return total(self.metrics("vllm:kv_cache_usage_perc")) == 0

    def plan(self, kind: str, prompt: Prompt) -> ReusePlan:
        request = uuid.uuid4().hex
        if kind == "exact":
            return exact_for_all(prompt, self.space, "public", request)
        return blend_for_all(prompt, self.space, "public", request, 1.0)

    def answer(self, prompt: Prompt, plan: ReusePlan) -> tuple[int, ...]:
        """Ask under a unique salt, so that values come from the store."""
        return complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=2,
            plan=plan.encode(),
            cache_salt=plan.request,
        ).token_ids

    @contextlib.contextmanager
    def asking(
        self, prompt: Prompt, plan: ReusePlan | None, max_tokens: int = 2
    ) -> Iterator[http.client.HTTPConnection]:
        """A client that disconnects at the end of the block, without waiting for its answer."""
        body: dict[str, Any] = {
            "model": "model",
            "prompt": list(prompt.token_ids),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "cache_salt": uuid.uuid4().hex,
        }
        if plan is not None:
            body["kv_transfer_params"] = {"ragcache": plan.encode()}
        connection = http.client.HTTPConnection(urlsplit(self.engine.url).netloc, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        try:
            yield connection
        finally:
            connection.close()


def clear_prompt(platform: Platform, *chunks: int) -> Prompt:
    """Return a prompt whose answer does not depend on rounding."""
    prompts = (make_blend_prompt(*chunks, question=f"interrupted {n}") for n in itertools.count())
    return next(prompt for prompt in prompts if is_clear(platform.engine.url, prompt, 2))


@pytest.fixture(scope="module")
def platform(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """A store with the chunks of two prompts, and an engine behind a connection that can stall."""
    folder = tmp_path_factory.mktemp("interrupted")
    store = start_cachestore(folder / "store", shared=False)
    engine = None
    try:
        with StallingConnection.to(store.address) as connection:
            engine = launch_engine(
                *(folder, tiny_model, connection.address, "--max-num-batched-tokens", "384"),
                settings={
                    **COMPUTES_PLAIN,
                    "RAGCACHE_RECOMPUTE_SLICE_TOKENS": "1",
                    "RAGCACHE_LOAD_DEADLINE_S": str(WAIT_S),
                },
            )
            wait_for_engine(engine)
            space = load_model_folder(str(tiny_model)).space("auto")
            platform = Interrupted(folder, tiny_model, store, engine, space, connection)
            for chunks in ((0, 1, 2), (3, 4, 5)):
                prompt = make_blend_prompt(*chunks)
                platform.answer(prompt, platform.plan("blend", prompt))
                platform.wait_until_stored(prompt)
            yield platform
    finally:
        if engine is not None:
            engine.service.stop()
        store.service.stop()


@pytest.mark.parametrize(("kind", "chunks"), [("exact", (0, 1, 2)), ("blend", (0, 2, 1, 4))])
def test_a_client_that_disconnects_during_a_load_ends_the_load(
    platform: Interrupted, kind: str, chunks: tuple[int, ...]
) -> None:
    prompt = clear_prompt(platform, *chunks)
    expected = platform.compute(prompt, max_tokens=2).token_ids
    cancelled, recomputations = platform.failed("cancelled"), platform.recomputations()
    left = platform.plan(kind, prompt)
    platform.connection.stall(STALL_BYTES)
    with platform.asking(prompt, left):
        platform.connection.wait_until_stalled()
    # The load ends and its blocks are free, although values are still missing.
    wait_until(lambda: platform.failed("cancelled") == cancelled + 1)
    wait_until(lambda: not platform.unfinished_requests())
    wait_until(platform.blocks_are_free)
    assert platform.connection.stalled == 1
    assert platform.recomputations() == recomputations
    record = platform.record(left.request)
    assert (record.loaded_tokens, record.blended_tokens, record.recomputed_tokens) == (0, 0, 0)
    assert record.load_s > 0
    platform.connection.resume()
    again = platform.plan(kind, prompt)
    assert platform.answer(prompt, again) == expected
    assert platform.record(again.request).loaded_tokens == prompt.chunk_ends[-1]


def test_clients_that_disconnect_during_their_recomputations_end_them(
    platform: Interrupted,
) -> None:
    """Each takes one step per token, and one is recomputed after the other."""
    prompt = clear_prompt(platform, 3, 2, 4, 0, 1)
    expected = platform.compute(prompt, max_tokens=2).token_ids
    num_blended = prompt.chunk_ends[-1] - TEMPLATE_TOKENS - LENGTHS[3]
    for _ in range(5):
        cancelled, recomputations = platform.failed("cancelled"), platform.recomputations()
        first, *left = [platform.plan("blend", prompt) for _ in range(7)]
        with contextlib.ExitStack() as clients:
            clients.enter_context(platform.asking(make_blend_prompt(), None, max_tokens=3500))
            asked = clients.enter_context(platform.asking(prompt, first))
            for plan in left:
                clients.enter_context(platform.asking(prompt, plan))
            # When the first one has its answer, the others have thousands of steps to go.
            assert asked.getresponse().status == 200
        wait_until(lambda: not platform.unfinished_requests())
        wait_until(platform.blocks_are_free)
        records = [platform.record(plan.request) for plan in left]
        ended = (
            platform.recomputations()
            - recomputations
            - 1
            - sum(one.recomputed_tokens > 0 for one in records)
        )
        # If the test stalls for so long that all are recomputed, try again.
        if ended > 0:
            break
    # They are recomputed one after the other, so one of them at most can end by itself while its
    # client leaves.
    num_cancelled = platform.failed("cancelled") - cancelled
    assert num_cancelled > 0
    assert 0 < ended <= num_cancelled + 1
    assert all(one.blended_tokens in (0, num_blended) for one in records)
    again = platform.plan("blend", prompt)
    assert platform.answer(prompt, again) == expected
    record = platform.record(again.request)
    assert (record.blended_tokens, record.recomputed_tokens) == (num_blended, num_blended)


def test_a_store_that_dies_during_loads_costs_recomputation(platform: Interrupted) -> None:
    """Last, as it kills the store. A blend uses what has arrived and recomputes the rest."""
    prompts = {
        "exact": clear_prompt(platform, 0, 1, 2),
        "blend": clear_prompt(platform, 2, 0, 4),
    }
    expected = {kind: platform.compute(p, max_tokens=2).token_ids for kind, p in prompts.items()}
    plans = {kind: platform.plan(kind, prompt) for kind, prompt in prompts.items()}
    failed = platform.failed(STORE_UNAVAILABLE)
    platform.connection.stall(STALL_BYTES)
    with ThreadPoolExecutor(2) as pool:
        asked = {k: pool.submit(platform.answer, prompts[k], plans[k]) for k in prompts}
        platform.connection.wait_until_stalled(connections=2)
        platform.store.service.kill()
        platform.connection.cut()
        assert {kind: one.result() for kind, one in asked.items()} == expected
    # A failed load, and two missing chunks of the blend.
    wait_until(lambda: platform.failed(STORE_UNAVAILABLE) == failed + 3)
    exact, blend = (platform.record(plans[kind].request) for kind in ("exact", "blend"))
    assert exact.miss == STORE_UNAVAILABLE
    # Full blocks of what had arrived.
    assert exact.loaded_tokens == (TEMPLATE_TOKENS + LENGTHS[0]) // BLOCK * BLOCK
    assert (exact.blended_tokens, exact.recomputed_tokens) == (0, 0)
    assert blend.miss == ""
    assert blend.loaded_tokens == prompts["blend"].chunk_ends[-1]
    context = sum(LENGTHS[n] for n in (2, 0, 4))
    assert (blend.blended_tokens, blend.recomputed_tokens) == (context, context)
    assert list(blend.missing_chunks) == [2, 3], "indexes of the segments that did not arrive"
    wait_until(platform.blocks_are_free)
    dead = platform.plan("blend", prompts["blend"])
    assert platform.answer(prompts["blend"], dead) == expected["blend"]
    record = platform.record(dead.request)
    assert (record.loaded_tokens, record.blended_tokens) == (0, 0)
