"""Slices: a recomputation cut into passes, so that other requests decode between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def slices(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> Iterator[tuple[range, ...]]:
    """Runs of positions as passes of at most max_tokens tokens and max_runs runs, 1 or more each.

    runs: ascending, apart from each other, none empty (``Recomputation.runs``). Passes are
    ascending, too, and as full as they can be; a run that does not fit is cut. Made one after
    another they come to what one pass would: a token looks only at those before it, which are as
    they will be by then.
    """
    if max_tokens < 1 or max_runs < 1:
        raise ValueError("a pass has room for 1 token and 1 run, or more")
    taken: list[range] = []
    room = max_tokens
    for run in runs:
        start = run.start
        while start < run.stop:
            if not room or len(taken) == max_runs:
                yield tuple(taken)
                taken, room = [], max_tokens
            stop = min(run.stop, start + room)
            taken.append(range(start, stop))
            room -= stop - start
            start = stop
    if taken:
        yield tuple(taken)
