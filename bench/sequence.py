"""Replays an access sequence against plain vLLM, LMCache and our engines, on a real model.

Contestants: ``plain`` is vLLM with its prefix cache and without a connector. ``plain_again`` is a
second one, and gives the noise floor. With ``--quick`` it is a second namespace in the prefix cache
of the first. ``lmcache`` has LMCache's multi-process connector; without LMCache it is skipped.
``exact`` and ``blend`` have our connector. ``exact_ahead`` and ``blend_ahead`` also have all
passages of the sequence computed before it, several in one prompt.

All engines are up at once, with KV caches of the same size. In each block of requests every
contestant gets one turn, in rotating order; the others use no CPU meanwhile. A turn begins when
the background work of the turn before has ended. Within a turn the engine's own background work
competes with its next request, as it does in production. ``cpu_s_per_request`` includes it.

A request follows 0.2 s after the answer before it (closed loop).

Requests before the measured ones fill the caches. Contestants that reuse prefixes only get those
of them from which a measured request has a prefix, and the latest ones; ``blend`` gets all.

Ratios are plain over the contestant, so more than 1 is faster. Intervals are 95 %, by bootstrap
over requests, paired. ``X_slower_share`` is the share of requests more than 5 % slower than plain
vLLM, minus the same share between the two plain engines. A full run has the requests to resolve
0.03 of it. The cap is the ratio that token counts alone allow
(``bench/support/sequences/figures.py``).

A full run takes hours. With ``--results FILE`` it can be interrupted: the same command goes on
where it ended. Before that it fills the caches with the requests so far, as before the first one.
``--minutes`` ends a run in time, and prints the figures of what has been measured.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.comparison import turns
from bench.support.number_type import fast_number_type
from bench.support.program import options, print_figures, say
from bench.support.sequences.contestants import (
    AHEAD,
    ALL,
    ANSWER_TOKENS,
    BLEND,
    EXACT,
    PLAIN,
    PLAIN_AGAIN,
    PREFIX_ONLY,
    RECOMPUTE_SHARE,
    SequenceContestant,
    Setup,
    running_contestants,
)
from bench.support.sequences.figures import (
    compare,
    computed_tokens,
    contestant_figures,
    useful_warm_up,
)
from bench.support.sequences.requests import (
    RECORDED,
    SequenceRequest,
    Vocabulary,
    ahead_prompts,
    generate,
    load_recorded,
    topics,
)
from bench.support.sequences.results import Results
from ragcache_cli.models.cache import fetch_model
from ragcache_kv.model.folder import load_model_folder

DATA_VARIABLE = "RAGCACHE_BENCH_DATA"
GENERATED = "generated"
LEAST_WARM_UP = 6
"""Requests before the measured ones that every contestant gets."""

GAP_S, WARM_UP_GAP_S = 0.2, 0.05
"""Between an answer and the next request."""

REQUESTS = 1000
"""Measured requests of a full run. They resolve an ``X_slower_share`` to 0.03 to either side if its
standard deviation is 0.48 per request or less. Its interval shows what a run has resolved."""

MAX_PROMPT_TOKENS = 7600
SEED = 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """A sequence. ``warm_up`` requests come before the measured ones."""

    requests: list[SequenceRequest]
    warm_up: int
    ahead: list[SequenceRequest]

    @property
    def measured(self) -> range:
        return range(self.warm_up, len(self.requests))

    def warm_up_of(self, contestant: str, first: int) -> list[SequenceRequest]:
        """Return what fills a contestant's caches before a measured request.

        Args:
            first: Index of that request.
        """
        indices: Sequence[int] = range(first)
        if contestant in PREFIX_ONLY:
            latest = set(indices[-LEAST_WARM_UP:])
            indices = sorted(latest.union(useful_warm_up(self.requests, first)))
        return [self.requests[index] for index in indices]


def load_sequence(arguments: argparse.Namespace, model: Path, vocabulary: Vocabulary) -> Replayed:
    count = arguments.warm_up + arguments.requests
    if arguments.sequence == GENERATED:
        requests, names = generate(count, vocabulary, SEED), topics()
    elif arguments.data is None:
        raise SystemExit(f"--sequence {arguments.sequence} needs --data or {DATA_VARIABLE}")
    else:
        recorded = load_recorded(
            arguments.sequence,
            Path(arguments.data),
            model,
            vocabulary,
            scale=arguments.scale,
            max_tokens=MAX_PROMPT_TOKENS,
        )
        requests, names = recorded.requests(arguments.first, count), recorded.topics()
    return Replayed(requests, arguments.warm_up, ahead_prompts(requests, names))


class Replay:
    """The contestants and the results so far.

    Args:
        ends_at: When to begin no further turn, in seconds of a monotonic clock.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        sequence: Replayed,
        contestants: Mapping[str, SequenceContestant],
        results: Results,
        ends_at: float,
    ) -> None:
        self._arguments = arguments
        self._sequence = sequence
        self._contestants = contestants
        self._results = results
        self._ends_at = ends_at
        self._warm_bytes: dict[str, dict[str, int]] = {}
        self._ahead_s: dict[str, float] = {}

    def warm_up(self) -> None:
        """Fill the caches of all contestants, one contestant after another."""
        for contestant in self._contestants.values():
            contestant.wait_until_idle()
        for name, contestant in self._contestants.items():
            if name in AHEAD:
                self._ahead_s[name] = contestant.compute_ahead(self._sequence.ahead)
            first = self._results.first_missing(name, self._sequence.measured)
            requests = self._sequence.warm_up_of(name, first)
            contestant.replay(requests, WARM_UP_GAP_S)
            self._warm_bytes[name] = contestant.store_bytes()
            say(f"{name}: {len(requests)} requests to warm up")

    def measure(self) -> dict[str, object]:
        """Ask the measured requests in turns, and return the figures of those measured so far."""
        blocks = turns(tuple(self._contestants), self._sequence.measured, self._arguments.block)
        for number, block in enumerate(blocks):
            if time.monotonic() >= self._ends_at:
                say(f"out of time before block {number}")
                break
            for turn in block:
                if self._results.has(turn.contestant, turn.requests):
                    continue
                contestant = self._contestants[turn.contestant]
                requests = [self._sequence.requests[index] for index in turn.requests]
                found = contestant.replay(requests, GAP_S)
                self._results.add(turn.contestant, turn.requests, found)
                mean_s = statistics.fmean(one.ttft_s for one in found)
                say(f"block {number}, {turn.contestant}: mean {mean_s * 1e3:.0f} ms")
        return self._figures()

    def _figures(self) -> dict[str, object]:
        sequence = self._sequence
        measured = self._results.common(tuple(self._contestants))
        count = len(measured[PLAIN])
        if not count:
            raise SystemExit("--minutes: no block of requests was measured in this time")
        asked = sequence.requests[: sequence.warm_up + count]
        computed, with_ahead = (
            computed_tokens(asked, sequence.warm_up, RECOMPUTE_SHARE, ahead)
            for ahead in ((), sequence.ahead)
        )
        caps = computed.caps() | with_ahead.caps("_ahead")
        return {
            **compare(measured, PLAIN, PLAIN_AGAIN, caps),
            "caps": {name: round(cap, 3) for name, cap in caps.items()},
            "contestants": {
                name: contestant_figures(found) | {"store_bytes": self._store_bytes(name)}
                for name, found in measured.items()
            },
            "computed_ahead_s": {name: round(s, 1) for name, s in self._ahead_s.items()},
            "computed_ahead_tokens": sum(prompt.num_tokens for prompt in sequence.ahead),
            "requests": count,
            "warm_up_requests": sequence.warm_up,
            "prompt_tokens_mean": round(computed.prompt / count),
            "settings": settings_of(self._arguments),
        }

    def _store_bytes(self, contestant: str) -> dict[str, int]:
        """Return bytes in a contestant's store, and bytes moved since this run's warm-up."""
        warm = self._warm_bytes[contestant]
        found = self._contestants[contestant].store_bytes()
        return {
            name: count if name == "stored" else count - warm.get(name, 0)
            for name, count in found.items()
        }


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options that the requests and their times depend on."""
    others = ("data", "results", "minutes")
    return {name: value for name, value in vars(arguments).items() if name not in others}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    started = time.monotonic()
    results = Results(arguments.results, settings_of(arguments))
    model = fetch_model("smollm2")
    loaded = load_model_folder(str(model))
    vocabulary = Vocabulary(int(loaded.config["vocab_size"]), SEED)
    sequence = load_sequence(arguments, model, vocabulary)
    longest = max(request.num_tokens for request in (*sequence.requests, *sequence.ahead))
    setup = Setup(
        model,
        loaded.space(fast_number_type()),
        longest + ANSWER_TOKENS + 1,
        one_plain_engine=arguments.quick,
    )
    with running_contestants(folder, arguments.contestants, setup) as (contestants, skipped):
        started_s = time.monotonic() - started
        say(f"all engines are up after {started_s:.0f} s; skipped: {skipped}")
        ends_at = started + 60 * arguments.minutes
        replay = Replay(arguments, sequence, contestants, results, ends_at)
        replay.warm_up()
        figures = replay.measure()
    return figures | {
        "skipped": skipped,
        "engines_started_s": round(started_s, 1),
        "took_s": round(time.monotonic() - started, 1),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, "a generated sequence, 4 minutes")
    option = parser.add_argument
    option("--sequence", choices=(GENERATED, *RECORDED), default=GENERATED)
    option("--data", default=os.environ.get(DATA_VARIABLE), help=f"or {DATA_VARIABLE}")
    option("--scale", type=float, default=1.0, help="factor of RAGPulse's lengths")
    option("--first", type=int, default=0, help="first request of the data; 500 in RAGPulse")
    option("--warm-up", type=int, default=100, help="requests before the measured ones")
    option("--requests", type=int, default=REQUESTS, help="measured requests")
    option("--results", type=Path, help="file of measured requests; a run goes on where it ended")
    option("--minutes", type=float, default=math.inf, help="begin no turn later than this")
    option("--contestants", nargs="+", choices=ALL, default=[PLAIN, PLAIN_AGAIN, EXACT, BLEND])
    arguments = parser.parse_args(argv)
    if PLAIN not in arguments.contestants:
        parser.error("--contestants needs plain, which the others are compared with")
    arguments.block = 10  # requests of a turn
    if arguments.quick:
        arguments.warm_up, arguments.requests, arguments.block = 12, 16, 8
    return arguments


def main() -> None:
    arguments = parse()
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
