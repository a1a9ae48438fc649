"""Replicas whose network is divided, as processes: a follower without its writer, and the reverse.

Each replica reaches each other one through a relay, which can let bytes wait. The Lease is a file,
which each replica finds by a symbolic link of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from bench.support.processes import free_port
from bench.support.retriever_replicas import (
    ReplicaProcess,
    Replicas,
    found,
    put,
    running_replicas,
    until,
)
from ragcache_core.errors import Unavailable
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.connection import CuttableConnection
from tests.kit.preloaded import preloaded_library

pytestmark = pytest.mark.timeout(600)

VOCABULARY = [f"word{i}" for i in range(100)]
COUNT = 3
MAX_LAG_S = 6.0


# Connections to some ports of loopback go to other ones: "PORT:OTHER PORT:OTHER ".
REDIRECT = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/socket.h>

static in_port_t redirected(in_port_t port) {
    const char *rules = getenv("REDIRECTED_PORTS");
    int from, to, length;
    while (rules && sscanf(rules, "%d:%d %n", &from, &to, &length) == 2) {
        if (ntohs(port) == from) return htons(to);
        rules += length;
    }
    return port;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    int (*original)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    struct sockaddr_storage copy;
    if (address->sa_family != AF_INET && address->sa_family != AF_INET6)
        return original(fd, address, length);
    memcpy(&copy, address, length);
    if (address->sa_family == AF_INET) {
        struct sockaddr_in *ipv4 = (struct sockaddr_in *)&copy;
        ipv4->sin_port = redirected(ipv4->sin_port);
    } else {
        struct sockaddr_in6 *ipv6 = (struct sockaddr_in6 *)&copy;
        ipv6->sin6_port = redirected(ipv6->sin6_port);
    }
    return original(fd, (struct sockaddr *)&copy, length);
}
"""


class Partitions:
    """Three replicas, and the links between them.

    Args:
        links: By the indexes of the replica that connects and the one that is connected to.
    """

    def __init__(
        self, folder: Path, replicas: Replicas, links: dict[tuple[int, int], CuttableConnection]
    ) -> None:
        self.replicas = replicas
        self._folder = folder
        self._links = links

    def isolate(self, replica: ReplicaProcess) -> None:
        """Let nothing pass between a replica and the others. Clients still reach it."""
        i = self.replicas.processes.index(replica)
        for pair, link in self._links.items():
            if i in pair:
                link.hold()

    def heal(self) -> None:
        """Let everything pass again."""
        for link in self._links.values():
            link.release()

    def cut_lease(self, replica: ReplicaProcess) -> None:
        """Let a replica neither read nor write the Lease."""
        link_lease(self._folder, self.replicas.processes.index(replica), "no-folder")

    def restore_lease(self, replica: ReplicaProcess) -> None:
        """Let it read and write the Lease again."""
        link_lease(self._folder, self.replicas.processes.index(replica), "lease")


def link_lease(folder: Path, i: int, target: str) -> None:
    link = folder / f"lease-of-{i}"
    new = link.with_suffix(".new")
    new.symlink_to(folder / target)
    new.replace(link)


@pytest.fixture
async def partitions(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Partitions]:
    (tmp_path / "lease").mkdir()
    (tmp_path / "no-folder").touch()
    ports = [free_port() for _ in range(COUNT)]
    redirect = preloaded_library(tmp_path, REDIRECT)
    async with contextlib.AsyncExitStack() as stack:
        links = {
            (i, j): await stack.enter_async_context(
                CuttableConnection.to(f"tcp://127.0.0.1:{ports[j]}")
            )
            for i, j in itertools.permutations(range(COUNT), 2)
        }

        def env(i: int) -> Mapping[str, str]:
            link_lease(tmp_path, i, "lease")
            rules = [f"{ports[j]}:{link.port} " for (start, j), link in links.items() if start == i]
            return {
                **redirect,
                "REDIRECTED_PORTS": "".join(rules),
                "RAGCACHE_LEASE": f"file:{tmp_path / f'lease-of-{i}' / 'lease.json'}",
                "RAGCACHE_MAX_LAG_S": str(MAX_LAG_S),
            }

        replicas = await stack.enter_async_context(
            running_replicas(tmp_path, tiny_model, COUNT, env, ports)
        )
        writer = replicas.processes.index(await replicas.writer())
        # Its followers reach it through the relays only.
        assert all(link.num_connections for (_, j), link in links.items() if j == writer)
        yield Partitions(tmp_path, replicas, links)


async def put_pages(replicas: Replicas, through: ReplicaProcess, name: str, count: int) -> None:
    for i in range(count):
        words = random.Random(f"{name} {i}").choices(VOCABULARY, k=20)
        text = f"The subject is {name} number{i}. {' '.join(words)}."
        await put(replicas.client(through), f"{name}-{i}", text)


async def hits_of(replicas: Replicas, one: ReplicaProcess, query: str) -> list[tuple[str, float]]:
    """Return documents and scores of the final hits."""
    stages = [stage async for stage in replicas.client(one).search("default", query, 20)]
    return [(hit.chunk.document_id, hit.score) for hit in stages[-1].hits]


async def names_of(replicas: Replicas, one: ReplicaProcess) -> set[str]:
    listed = await replicas.client(one).list_documents("default", 1000)
    return {document.id for document in listed.documents}


async def check_same(replicas: Replicas, names: set[str]) -> None:
    """Check that all replicas have these documents, and find the same with the same scores."""
    for one in replicas.processes:
        assert await names_of(replicas, one) == names
    for query in ("the subject before number3", "meanwhile number7", "word1 word2 word3"):
        first, *others = [await hits_of(replicas, one, query) for one in replicas.processes]
        assert len(first) >= 10
        assert others == [first] * len(others)


async def lag_exceeds(replicas: Replicas, one: ReplicaProcess, lag_s: float) -> bool:
    status = await replicas.status(one)
    return status is not None and status.lag_s > lag_s


async def test_a_follower_that_is_cut_off_answers_tells_its_lag_and_catches_up(
    partitions: Partitions,
) -> None:
    replicas = partitions.replicas
    writer = await replicas.writer()
    cut_off, other = replicas.others(writer)
    await put_pages(replicas, writer, "before", 10)
    await replicas.until_equal(replicas.processes)
    partitions.isolate(cut_off)
    # The other two are a majority.
    await put_pages(replicas, writer, "meanwhile", 15)
    await replicas.client(other).delete_document("default", "before-0")
    assert await names_of(replicas, cut_off) == {f"before-{i}" for i in range(10)}
    await until(lambda: lag_exceeds(replicas, cut_off, MAX_LAG_S), "the replica tells no lag")
    await replicas.until_not_ready(cut_off)
    # Its clients can still search, and none of their writes is lost or hangs.
    assert "before-3" in await found(replicas.client(cut_off), "before number3")
    document = pb.Document(collection="default", id="lost", text="The subject is lost.")
    with pytest.raises(Unavailable):
        await replicas.client(cut_off).upsert_document(document)
    await replicas.until_ready([writer, other])
    assert await replicas.writer() is writer
    partitions.heal()
    await replicas.until_ready()
    await replicas.until_equal(replicas.processes)
    status = await replicas.status(cut_off)
    assert status is not None
    assert status.lag_s == 0
    assert "takes a copy" not in cut_off.log
    names = {f"before-{i}" for i in range(1, 10)} | {f"meanwhile-{i}" for i in range(15)}
    await check_same(replicas, names)


@pytest.mark.parametrize("reaches_others", [False, True])
async def test_a_writer_that_is_cut_off_from_the_lease_acknowledges_nothing_more(
    partitions: Partitions, reaches_others: bool
) -> None:
    replicas = partitions.replicas
    first = await replicas.writer()
    others = replicas.others(first)
    await put_pages(replicas, first, "before", 10)
    await replicas.until_equal(replicas.processes)
    partitions.cut_lease(first)
    if not reaches_others:
        partitions.isolate(first)
    refused = asyncio.create_task(until_refused(replicas, first))
    second = await replicas.writer(other_than=first)
    # It stopped before the other one began.
    acknowledged = await refused
    status = await replicas.status(first)
    assert status is not None
    assert status.role == pb.RetrieverStatus.ROLE_FOLLOWER
    await put_pages(replicas, second, "meanwhile", 15)
    assert await found(replicas.client(first), "before number3")
    partitions.heal()
    partitions.restore_lease(first)
    await replicas.until_ready()
    await replicas.until_equal(replicas.processes)
    assert (await replicas.writer()) in others
    names = {f"before-{i}" for i in range(10)} | {f"meanwhile-{i}" for i in range(15)}
    # A write that was not acknowledged may be there or not, as after any lost answer.
    stored = await names_of(replicas, second)
    assert names | acknowledged <= stored
    await check_same(replicas, stored)


async def test_a_writer_that_reaches_only_the_lease_hands_over(partitions: Partitions) -> None:
    replicas = partitions.replicas
    first = await replicas.writer()
    others = replicas.others(first)
    await put_pages(replicas, first, "before", 10)
    partitions.isolate(first)
    second = await replicas.writer(other_than=first)
    assert "lease: left epoch=1 reason=no majority of the replicas can be reached" in first.log
    # The others are a majority. The first one may have the Lease again only after them.
    await put_pages(replicas, second, "meanwhile", 10)
    assert await found(replicas.client(first), "before number3")
    partitions.heal()
    await replicas.until_ready()
    await replicas.until_equal(replicas.processes)
    assert await replicas.writer() in others
    names = {f"{name}-{i}" for name in ("before", "meanwhile") for i in range(10)}
    await check_same(replicas, names)


async def until_refused(replicas: Replicas, one: ReplicaProcess) -> set[str]:
    """Write until the writer refuses because of its role. Return what it acknowledged."""
    acknowledged: set[str] = set()
    for i in range(100_000):
        name = f"alone-{i}"
        document = pb.Document(collection="default", id=name, text=f"The subject is {name}.")
        try:
            await replicas.client(one).upsert_document(document)
        except Unavailable as error:
            if "too few replicas" not in str(error):
                return acknowledged
        else:
            acknowledged.add(name)
        await asyncio.sleep(0.05)
    raise AssertionError("it accepts writes without end")
