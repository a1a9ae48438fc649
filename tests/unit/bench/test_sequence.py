"""The sequence benchmark's options, and what each contestant is warmed up with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sequence import LEAST_WARM_UP, Replayed, load_sequence, parse, settings_of
from bench.support.sequences.requests import Vocabulary

WORDS = Vocabulary(50_000, seed=1)


def generated(warm_up: int) -> Replayed:
    arguments = parse(["--warm-up", str(warm_up), "--requests", "10"])
    return load_sequence(arguments, Path("unused"), WORDS)


def test_plain_vllm_has_to_be_there() -> None:
    with pytest.raises(SystemExit):
        parse(["--contestants", "blend"])


def test_data_of_a_sequence_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_BENCH_DATA", raising=False)
    arguments = parse(["--sequence", "ragpulse"])
    arguments.data = None
    with pytest.raises(SystemExit, match="RAGCACHE_BENCH_DATA"):
        load_sequence(arguments, Path("unused"), WORDS)


def test_a_sequence_has_warm_up_and_measured_requests() -> None:
    sequence = generated(30)
    assert sequence.measured == range(30, 40)
    assert len(sequence.requests) == 40
    computed = {part.name for prompt in sequence.ahead for part in prompt.passages}
    assert computed == {part.name for request in sequence.requests for part in request.passages}


def test_only_chunk_reuse_is_warmed_up_with_all_requests() -> None:
    sequence = generated(30)
    assert sequence.warm_up_of("blend", 30) == sequence.requests[:30]
    # Heads differ, so a prefix cache gains nothing from the others.
    assert sequence.warm_up_of("plain", 30) == sequence.requests[30 - LEAST_WARM_UP : 30]


def test_a_run_that_goes_on_has_the_caches_of_the_requests_so_far() -> None:
    sequence = generated(30)
    assert sequence.warm_up_of("blend", 35) == sequence.requests[:35]
    assert sequence.warm_up_of("plain", 35) == sequence.requests[35 - LEAST_WARM_UP : 35]


def test_a_run_goes_on_under_the_same_settings_wherever_its_files_are() -> None:
    one = parse(["--results", "one", "--minutes", "5", "--data", "here"])
    assert settings_of(one) == settings_of(parse([]))
    assert settings_of(one) != settings_of(parse(["--requests", "7"]))
