"""Cuts a recomputation into passes, so that other requests can decode between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Runs = tuple[range, ...]


def split_first_pass(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> tuple[Runs, Runs]:
    """Split off the runs that fit into one pass, and return them and the rest.

    A pass has at most max_tokens tokens and max_runs runs and is as full as possible. A run that
    does not fit is cut.

    Args:
        runs: Ascending, disjoint, none empty (``TokenSelection.runs``).
        max_tokens: At least 1.
        max_runs: At least 1.
    """
    if max_tokens < 1 or max_runs < 1:
        raise ValueError("max_tokens and max_runs must be at least 1")
    num_left = max_tokens
    for index, run in enumerate(runs):
        if index == max_runs or not num_left:
            return tuple(runs[:index]), tuple(runs[index:])
        if len(run) > num_left:
            taken, left = run[:num_left], run[num_left:]
            return (*runs[:index], taken), (left, *runs[index + 1 :])
        num_left -= len(run)
    return tuple(runs), ()


def split_into_passes(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> Iterator[Runs]:
    """Yield runs of positions as ascending passes, each as in ``split_first_pass``.

    Passes that are executed one after another have the result of a single pass: a token attends
    only to tokens before it, which are final by then.
    """
    while runs:
        taken, runs = split_first_pass(runs, max_tokens=max_tokens, max_runs=max_runs)
        yield taken


def runs_outside(runs: Sequence[range], excluded: Sequence[range]) -> Runs:
    """Return the positions of runs that are in none of the excluded ones.

    Args:
        runs: Ascending, disjoint.
        excluded: Ascending, disjoint.
    """
    left: list[range] = []
    for run in runs:
        start = run.start
        for one in excluded:
            if one.stop <= start or one.start >= run.stop:
                continue
            left.append(range(start, one.start))
            start = one.stop
        left.append(range(start, run.stop))
    return tuple(one for one in left if one)


def merge_runs(runs: Sequence[range]) -> Runs:
    """Return the positions of all runs, which may overlap, as ascending disjoint runs."""
    joined: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return tuple(joined)
