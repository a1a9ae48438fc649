"""Replays an access sequence against plain vLLM, LMCache and our engines, on a real model.

Contestants: ``plain`` is vLLM with its prefix cache and without a connector. ``plain_again`` is a
second one, and gives the noise floor. With ``--one-plain-engine`` (and ``--quick``) it is a second
namespace in the prefix cache of the first. ``lmcache`` has LMCache's multi-process connector;
without LMCache it is skipped. ``exact`` and ``blend`` have our connector. ``exact_ahead`` and
``blend_ahead`` also have all passages of the sequence computed before it, several in one prompt.

All engines are up at once, with KV caches of the same size. In each block of requests every
contestant gets one turn, in rotating order; the others use no CPU meanwhile. A turn begins when
the background work of the turn before has ended. Within a turn the engine's own background work
competes with its next request, as it does in production. ``cpu_s_per_request`` includes it.

``--gap`` is the time between an answer and the next request (closed loop). ``--open-loop`` sends
Poisson arrivals at a share of plain vLLM's measured capacity; all contestants get the same ones,
and every turn begins with an empty queue.

Requests before the measured ones fill the caches. Contestants that reuse prefixes only get those
of them from which a measured request has a prefix, and the latest ones; ``blend`` gets all.

Ratios are plain over the contestant, so more than 1 is faster. Intervals are 95 %, by bootstrap
over requests, paired. ``X_slower_share`` is the share of requests more than 5 % slower than plain
vLLM, less the share by which the two plain engines differ from each other. The cap is the ratio
that token counts alone allow (``bench/support/sequences/cap.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.number_type import fast_number_type
from bench.support.sequences.cap import computed_tokens, useful_warm_up
from bench.support.sequences.comparison import caps_of, compare
from bench.support.sequences.contestants import (
    AHEAD,
    ALL,
    BLEND,
    BLEND_AHEAD,
    EXACT,
    PLAIN,
    PLAIN_AGAIN,
    PREFIX_ONLY,
    SequenceContestant,
    Setup,
    running_contestants,
)
from bench.support.sequences.cost_fit import recompute_costs
from bench.support.sequences.generated import ZipfShape, generate, topics
from bench.support.sequences.prompts import SequenceRequest, Vocabulary, ahead_prompts
from bench.support.sequences.recorded import RECORDED, load_recorded
from bench.support.sequences.turn_figures import Measured, contestant_figures
from bench.support.sequences.turns import poisson_arrivals, turns
from ragcache_cli.models.cache import fetch_model
from ragcache_kv.model_folder import load_model_folder

DATA_VARIABLE = "RAGCACHE_BENCH_DATA"
GENERATED = "generated"
BUNDLED = "bundled:"
PROBE_TOKENS = (64, 128, 256, 384, 512)
"""Lengths of prefills in plain vLLM, with which blended requests are compared."""

LEAST_WARM_UP = 6
"""Requests before the measured ones that every contestant gets."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A sequence. ``warm_up`` requests come before the measured ones."""

    requests: list[SequenceRequest]
    warm_up: int
    ahead: list[SequenceRequest]

    @property
    def measured(self) -> range:
        """Return the indices of the measured requests."""
        return range(self.warm_up, len(self.requests))

    def warm_up_of(self, contestant: str) -> list[SequenceRequest]:
        indices: Sequence[int] = range(self.warm_up)
        if contestant in PREFIX_ONLY:
            latest = set(indices[-LEAST_WARM_UP:])
            indices = sorted(latest.union(useful_warm_up(self.requests, self.warm_up)))
        return [self.requests[index] for index in indices]


def load_sequence(arguments: argparse.Namespace, model: Path, vocabulary: Vocabulary) -> Replayed:
    """Generate or load the sequence that the arguments name."""
    count = arguments.warm_up + arguments.requests
    if arguments.sequence == GENERATED:
        shape = ZipfShape()
        requests = generate(shape, count, vocabulary, arguments.seed)
        names = topics(shape)
    else:
        recorded = load_recorded(
            arguments.sequence,
            _data(arguments),
            model,
            vocabulary,
            scale=arguments.scale,
            max_tokens=arguments.max_prompt,
        )
        requests, names = recorded.requests(arguments.first, count), recorded.topics()
    return Replayed(requests, arguments.warm_up, ahead_prompts(requests, names))


def _data(arguments: argparse.Namespace) -> Path:
    if arguments.data is None:
        raise SystemExit(f"--sequence {arguments.sequence} needs --data or {DATA_VARIABLE}")
    return Path(arguments.data)


class Replay:
    """The contestants and what is known of the run so far."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        sequence: Replayed,
        contestants: Mapping[str, SequenceContestant],
        vocabulary: Vocabulary,
    ) -> None:
        self._arguments = arguments
        self._sequence = sequence
        self._contestants = contestants
        self._vocabulary = vocabulary
        self._prefills: list[Measured] = []
        self._warm_bytes: dict[str, dict[str, int]] = {}
        self._ahead_s: dict[str, float] = {}
        self._requests_per_s: float | None = None

    def warm_up(self) -> None:
        """Fill the caches of all contestants, one contestant after another."""
        for contestant in self._contestants.values():
            contestant.wait_until_idle()
        for name, contestant in self._contestants.items():
            if name in AHEAD:
                self._ahead_s[name] = contestant.compute_ahead(self._sequence.ahead)
            requests = self._sequence.warm_up_of(name)
            found = contestant.replay(requests, self._arguments.warm_up_gap)
            contestant.cpu_s = 0.0
            self._warm_bytes[name] = contestant.store_bytes()
            _log(f"{name}: {len(requests)} requests to warm up")
            if name == PLAIN and self._arguments.open_loop:
                # The first requests also warm up the engine itself.
                latest_s = [one.answer_s for one in found[-LEAST_WARM_UP:]]
                capacity = 1 / statistics.fmean(latest_s)
                self._requests_per_s = self._arguments.open_loop * capacity

    def measure(self, out: Path | None) -> dict[str, object]:
        """Ask the measured requests in turns, and return the figures.

        Args:
            out: File for the figures after each block.
        """
        figures: dict[str, object] = {}
        blocks = turns(tuple(self._contestants), self._sequence.measured, self._arguments.block)
        for number, block in enumerate(blocks):
            for turn in block:
                contestant = self._contestants[turn.contestant]
                requests = [self._sequence.requests[index] for index in turn.requests]
                found = contestant.replay(
                    requests, self._arguments.gap, self._arrivals(len(requests), number)
                )
                contestant.measured.update(zip(turn.requests, found, strict=True))
                if turn.contestant == PLAIN:
                    self._probe(requests[-1])
                mean_s = statistics.fmean(one.ttft_s for one in found)
                _log(f"block {number}, {turn.contestant}: mean {mean_s * 1e3:.0f} ms")
            figures = self.figures()
            if out is not None:
                out.write_text(json.dumps(figures) + "\n")
        return figures

    def figures(self) -> dict[str, object]:
        """Return the figures of the blocks measured so far."""
        arguments, sequence = self._arguments, self._sequence
        measured = {
            name: [contestant.measured[index] for index in sorted(contestant.measured)]
            for name, contestant in self._contestants.items()
        }
        count = min(map(len, measured.values()))
        done = sequence.requests[: sequence.warm_up + count]
        share = arguments.recompute_share
        computed = computed_tokens(done, sequence.warm_up, share)
        ahead = computed_tokens(done, sequence.warm_up, share, sequence.ahead)
        caps = caps_of(computed, ahead)
        return {
            **compare(measured, PLAIN, PLAIN_AGAIN, caps),
            **self._recompute_costs(measured),
            "caps": {name: round(cap, 3) for name, cap in caps.items()},
            "contestants": {
                name: contestant_figures(found, self._contestants[name].cpu_s)
                | {"store_bytes": self._store_bytes(name)}
                for name, found in measured.items()
            },
            "computed_ahead_s": {name: round(s, 1) for name, s in self._ahead_s.items()},
            "computed_ahead_tokens": sum(prompt.num_tokens for prompt in sequence.ahead),
            "requests": count,
            "warm_up_requests": sequence.warm_up,
            "prompt_tokens_mean": round(computed.prompt / count),
            "requests_per_s": self._requests_per_s and round(self._requests_per_s, 3),
            "settings": {
                key: value
                for key, value in vars(arguments).items()
                if key not in ("out", "data", "folder")
            },
        }

    def _probe(self, last: SequenceRequest) -> None:
        """Measure prefills in plain vLLM after the last request, in this turn's conditions."""
        plain = self._contestants[PLAIN]
        done = len(self._prefills)
        new = [self._vocabulary.draw(f"probe {done}.{length}", length) for length in PROBE_TOKENS]
        self._prefills += plain.probe_prefills(last.token_ids, new)

    def _recompute_costs(self, measured: Mapping[str, Sequence[Measured]]) -> dict[str, object]:
        for name in (BLEND, BLEND_AHEAD):
            if name in measured:
                return {**recompute_costs(measured[name], self._prefills)}
        return {}

    def _store_bytes(self, contestant: str) -> dict[str, int]:
        """Return bytes in a contestant's store, and bytes moved since the warm-up."""
        warm = self._warm_bytes[contestant]
        found = self._contestants[contestant].store_bytes()
        return {
            name: count if name == "stored" else count - warm.get(name, 0)
            for name, count in found.items()
        }

    def _arrivals(self, count: int, block: int) -> list[float] | None:
        if self._requests_per_s is None:
            return None
        return poisson_arrivals(count, self._requests_per_s, self._arguments.seed + block)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    started = time.monotonic()
    model = _model_folder(arguments.model)
    loaded = load_model_folder(str(model))
    vocabulary = Vocabulary(int(loaded.config["vocab_size"]), arguments.seed)
    sequence = load_sequence(arguments, model, vocabulary)
    longest = max(request.num_tokens for request in (*sequence.requests, *sequence.ahead))
    setup = Setup(
        model,
        loaded.space(fast_number_type()),
        longest + max(PROBE_TOKENS) + arguments.answer_tokens + 1,
        arguments.kv_cache_gib,
        arguments.recompute_share,
        arguments.answer_tokens,
        arguments.one_plain_engine,
    )
    with running_contestants(folder, arguments.contestants, setup) as (contestants, skipped):
        for name, reason in skipped.items():
            _log(f"{name} is skipped: {reason}")
        started_s = time.monotonic() - started
        _log(f"all engines are up after {started_s:.0f} s")
        replay = Replay(arguments, sequence, contestants, vocabulary)
        replay.warm_up()
        figures = replay.measure(arguments.out)
    return figures | {
        "skipped": skipped,
        "engines_started_s": round(started_s, 1),
        "took_s": round(time.monotonic() - started, 1),
    }


def _model_folder(source: str) -> Path:
    if source.startswith(BUNDLED):
        return fetch_model(source.removeprefix(BUNDLED))
    return Path(source)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a generated sequence, 4 minutes")
    option = parser.add_argument
    option("--model", default="bundled:smollm2", help="a folder, or bundled:NAME")
    option("--sequence", choices=(GENERATED, *RECORDED), default=GENERATED)
    option("--data", default=os.environ.get(DATA_VARIABLE), help=f"or {DATA_VARIABLE}")
    option("--scale", type=float, default=1.0, help="factor of RAGPulse's lengths")
    option("--first", type=int, default=0, help="first request of the data; 500 in RAGPulse")
    option("--warm-up", type=int, default=100, help="requests before the measured ones")
    option("--requests", type=int, default=100, help="measured requests")
    option("--block", type=int, default=10, help="requests of a turn")
    option("--gap", type=float, default=0.2, help="seconds between requests")
    option("--warm-up-gap", type=float, default=0.05)
    option("--open-loop", type=float, help="arrivals at this share of capacity, for example 0.7")
    option("--contestants", nargs="+", choices=ALL, default=[PLAIN, PLAIN_AGAIN, EXACT, BLEND])
    option("--one-plain-engine", action="store_true", help="for both plain contestants")
    option("--recompute-share", type=float, default=0.15)
    option("--answer-tokens", type=int, default=4)
    option("--max-prompt", type=int, default=7600, help="longest prompt in tokens")
    option("--kv-cache-gib", type=int, default=1, help="of each engine")
    option("--seed", type=int, default=1)
    option("--folder", type=Path, help="for logs and stores; default: a temporary one")
    option("--out", type=Path, help="file for the figures after each block")
    arguments = parser.parse_args(argv)
    if PLAIN not in arguments.contestants:
        parser.error("--contestants needs plain, which the others are compared with")
    if arguments.quick:
        arguments.warm_up, arguments.requests, arguments.block = 20, 32, 8
        arguments.one_plain_engine = True
    return arguments


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(arguments, arguments.folder or Path(folder))))


if __name__ == "__main__":
    main()
