"""Measures what times to the first token tell a tenant about another tenant's questions.

All parts are the real processes, with a vLLM engine. Tenant ``red`` asks about half of some texts,
drawn at random. Then tenant ``blue`` asks about all of them, in random order, and compares its
times to the first token. If the platform shared what it has cached for ``red``, the times of the
texts that ``red`` has asked about would be shorter. Kinds of texts:

- ``shared document``: both may read it, and ask the same question about it.
- ``private document``: ``red`` alone may read it. ``blue`` has guessed its text, and puts it into a
  collection of its own.
- ``prompt``: the prompt of a completion without documents, which ``blue`` has guessed.
- ``same tenant``: as ``shared document``, asked by another key of the tenant ``red``. Keys of a
  tenant share KV by design, so this shows what the measurement can tell.

Figures:

- ``auc``: how well the times tell apart what ``red`` has asked and has not asked, for all kinds of
  another tenant together: the larger of AUC and 1 - AUC. 0.5: not at all; 1: always. Pairs are of
  one kind.
- ``interval``: the central 95 % of AUC over bootstrap samples; it has 0.5 in it if nothing leaks.
- ``by_kind``: the same for each kind, with the medians of the times.

``python -m bench.tenants [--quick]`` prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support.answers.platform import Platform as Rest
from bench.support.answers.question_sets import KnownDocument
from bench.support.api_keys import headers, key
from bench.support.cluster import processes
from bench.support.cluster.open_loop import CHAT, ask
from bench.support.cluster.processes import PlatformSpec
from bench.support.program import options, print_figures, say
from bench.support.retrieval.generated_documents import WORDS
from ragcache_core.access.key_file import hash_text

SEED: Final = 1
COMPLETION: Final = "/v1/completions"
TEXT_WORDS: Final = 500
QUOTED_WORDS: Final = 8
GROUP: Final = 10
"""Texts that ``red`` asks about, or does not, before ``blue`` asks about all of them."""

ANSWER_TOKENS: Final = 2
SAMPLES: Final = 2000
"""Bootstrap samples."""

SHARED, PRIVATE, PROMPT, SAME = "shared document", "private document", "prompt", "same tenant"
ATTACKS: Final = (SHARED, PRIVATE, PROMPT)
COLLECTION: Final = "both"
KEYS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "red": ("red", (COLLECTION, "red")),
    "twin": ("red", (COLLECTION, "red")),
    "blue": ("blue", (COLLECTION, "blue")),
}
"""Tenant and collections of each key."""

SETTINGS: Final = {"chunking": {"size_tokens": 2048}, "window": 0}
TINYRAG: Final = Path(__file__).resolve().parents[1] / "models" / "tinyrag" / "model"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many texts of each kind there are, and of the kind within a tenant."""

    attack: int
    same: int


FULL: Final = Sizes(200, 60)
QUICK: Final = Sizes(40, 30)


@dataclass(frozen=True, slots=True)
class Probe:
    """A text that ``red`` may have asked about."""

    kind: str
    number: int
    text: str

    @property
    def attacker(self) -> str:
        """The key that asks afterwards."""
        return "twin" if self.kind == SAME else "blue"

    @property
    def document(self) -> KnownDocument:
        """The text as a document."""
        return KnownDocument(f"{self.kind}-{self.number}".replace(" ", "-"), "", self.text)

    def request(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of the question of a key."""
        limits = {"max_tokens": ANSWER_TOKENS, "stream": True, "temperature": 0}
        if self.kind == PROMPT:
            return COMPLETION, {"prompt": self.text, **limits}
        words = self.text.split()[TEXT_WORDS // 2 :][:QUOTED_WORDS]
        content = f'Where does it say "{" ".join(words)}"?'
        collection = name if self.kind == PRIVATE else COLLECTION
        retrieval = {"collection": collection, "top_k": 1}
        messages = [{"role": "user", "content": content}]
        return CHAT, {"messages": messages, "ragcache": retrieval, **limits}


@dataclass(slots=True)
class Times:
    """Seconds to the first token of texts that ``red`` has asked about, and of others."""

    asked: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def resampled(self, rng: np.random.Generator) -> Times:
        """Draw as many of each, with replacement."""
        return Times(*(list(rng.choice(one, len(one))) for one in (self.asked, self.other)))


def auc(kinds: Sequence[Times]) -> float:
    """Return the share of pairs of one kind in which the text that was asked about is faster.

    Pairs with equal times count half.
    """
    faster = pairs = 0.0
    for times in kinds:
        differences = np.subtract.outer(np.array(times.other), np.array(times.asked))
        faster += float((differences > 0).sum()) + float((differences == 0).sum()) / 2
        pairs += differences.size
    return faster / pairs


def separation(kinds: Sequence[Times]) -> dict[str, Any]:
    """Return the larger of AUC and 1 - AUC, and the interval of AUC."""
    rng = np.random.default_rng(SEED)
    samples = [auc([one.resampled(rng) for one in kinds]) for _ in range(SAMPLES)]
    found = auc(kinds)
    low, high = np.quantile(samples, [0.025, 0.975])
    interval = [round(float(low), 3), round(float(high), 3)]
    return {"auc": round(max(found, 1 - found), 4), "interval": interval}


def make_probes(sizes: Sizes, rng: random.Random) -> list[Probe]:
    """Return the texts in random order. Each is of other words in another order."""
    counts = dict.fromkeys(ATTACKS, sizes.attack) | {SAME: sizes.same}
    probes = [
        Probe(kind, number, " ".join(rng.choices(WORDS, k=TEXT_WORDS)))
        for kind, count in counts.items()
        for number in range(count)
    ]
    rng.shuffle(probes)
    return probes


def write_keys(file: Path) -> Path:
    """Write the keys of the tenants, and one that puts the documents."""
    entries = [f'[[keys]]\nname = "admin"\nhash = "{hash_text(key("admin"))}"\nscopes = ["admin"]']
    for name, (tenant, collections) in KEYS.items():
        names = ", ".join(f'"{one}"' for one in collections)
        entries.append(
            f'[[keys]]\nname = "{name}"\nhash = "{hash_text(key(name))}"\nscopes = ["ask"]\n'
            f'tenant = "{tenant}"\ncollections = [{names}]'
        )
    file.write_text("\n".join(entries) + "\n")
    return file


def start(platform: processes.Platform, probes: Sequence[Probe]) -> int:
    """Start all parts, and put the documents. Return the gateway's port."""
    engines = [one.name for one in platform.of("engine")]
    for name in ("retriever", "cachestore"):
        platform.start(name)
    platform.wait("cachestore")
    for name in engines:
        platform.start(name)
    platform.wait("retriever", *engines)
    port = platform.start_gateway(write_keys(platform.data / "keys.toml"), "admin")
    rest = Rest(f"http://127.0.0.1:{port}", headers("admin"))
    private = [one.document for one in probes if one.kind == PRIVATE]
    both = [one.document for one in probes if one.kind in (SHARED, SAME)]
    for name, documents in ((COLLECTION, both), ("red", private), ("blue", private)):
        rest.put_collection(name, SETTINGS, documents)
    rest.close()
    return port


class Spy:
    """Asks for ``red`` and for those who want to know what ``red`` has asked."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self.times: dict[str, Times] = {}

    async def measure(self, probes: Sequence[Probe]) -> None:
        """Ask about all texts, a group at a time."""
        for group in _groups(probes):
            asked = set(self._rng.sample(group, len(group) // 2))
            for probe in self._shuffled(asked):
                await self._first_s(probe, "red")
            for probe in self._shuffled(group):
                took_s = await self._first_s(probe, probe.attacker)
                times = self.times.setdefault(probe.kind, Times())
                (times.asked if probe in asked else times.other).append(took_s)

    async def _first_s(self, probe: Probe, name: str) -> float:
        path, body = probe.request(name)
        answer = await ask(self._port, path, body, time.monotonic(), headers(name))
        if answer.error:
            raise RuntimeError(f"{name} got no answer about {probe.kind}: {answer.error}")
        return answer.first_s

    def _shuffled(self, probes: Sequence[Probe] | set[Probe]) -> list[Probe]:
        # In an order of its own, since a set's depends on hashes of texts.
        ordered = sorted(probes, key=lambda one: (one.kind, one.number))
        return self._rng.sample(ordered, len(ordered))


def _groups(probes: Sequence[Probe]) -> Iterator[Sequence[Probe]]:
    for begin in range(0, len(probes), GROUP):
        yield probes[begin : begin + GROUP]


def figures_of(times: Mapping[str, Times]) -> dict[str, Any]:
    """Return all figures."""
    by_kind = {}
    for kind, one in times.items():
        medians = {
            f"{name}_p50_ms": round(1e3 * statistics.median(seconds), 1)
            for name, seconds in (("asked", one.asked), ("other", one.other))
        }
        counts = {"texts": len(one.asked) + len(one.other)}
        by_kind[kind] = separation([one]) | medians | counts
    return separation([times[kind] for kind in ATTACKS]) | {"by_kind": by_kind}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the command line asks for."""
    started_s = time.monotonic()
    rng = random.Random(SEED)
    probes = make_probes(QUICK if arguments.quick else FULL, rng)
    with processes.platform(PlatformSpec(TINYRAG, 1), folder / "platform") as platform:
        port = start(platform, probes)
        say(f"started after {time.monotonic() - started_s:.0f} s")
        spy = Spy(port, rng)
        warm_up = [Probe(SAME, number, "a lamp is green " * 30) for number in range(2 * GROUP)]
        asyncio.run(spy.measure(warm_up))
        spy.times.clear()
        asyncio.run(spy.measure(probes))
    return figures_of(spy.times) | {"took_s": round(time.monotonic() - started_s, 1)}


def main() -> None:
    arguments = options(__doc__, "40 texts of each kind; under 2 min").parse_args()
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
