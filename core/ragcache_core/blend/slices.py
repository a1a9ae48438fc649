"""Slices: a recomputation cut into passes, so that other requests decode between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Runs = tuple[range, ...]


def split_first_pass(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> tuple[Runs, Runs]:
    """The first of runs, as many as one pass takes, and the rest.

    runs: ascending, apart from each other, none empty (``TokenSelection.runs``). A pass has at most
    max_tokens tokens and max_runs runs, 1 or more each, and is as full as it can be; a run that
    does not fit is cut.
    """
    if max_tokens < 1 or max_runs < 1:
        raise ValueError("a pass has room for 1 token and 1 run, or more")
    room = max_tokens
    for place, run in enumerate(runs):
        if place == max_runs or not room:
            return tuple(runs[:place]), tuple(runs[place:])
        if len(run) > room:
            taken, left = run[:room], run[room:]
            return (*runs[:place], taken), (left, *runs[place + 1 :])
        room -= len(run)
    return tuple(runs), ()


def split_into_passes(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> Iterator[Runs]:
    """Runs of positions as passes (``split_first_pass``) of at most max_tokens tokens and max_runs runs.

    Passes are ascending. Made one after another they come to what one pass would: a token looks
    only at those before it, which are as they will be by then.
    """
    while runs:
        taken, runs = split_first_pass(runs, max_tokens=max_tokens, max_runs=max_runs)
        yield taken


def merge_runs(runs: Sequence[range]) -> Runs:
    """The positions of all runs, which may overlap, as ascending runs apart from each other."""
    joined: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return tuple(joined)
