"""Cuts long prefills into slices, so that a question waits for one slice at most.

vLLM schedules running requests before waiting ones, so a long prefill holds every engine step until
it ends. A slice is a request for a longer beginning of the same prompt. The engine's prefix cache
has the beginning before it, and computes only what is new.

A short slice delays questions less. But each pass has a fixed cost, and each slice is a request of
its own, so short slices waste time.
"""

from __future__ import annotations

from ragcache_core.cost.prefill_profile import PrefillProfile

ALIGNMENT_TOKENS = 128
"""Slices end at multiples of this many tokens. vLLM's prefix cache has whole blocks only, of 128
tokens on a CPU and of 16 on most devices. A slice that ends inside a block computes it twice."""

SHORT_S = 0.02
"""A slice of at most this time may be longer than the rate requires."""

MAX_REST_SHARE = 0.5
"""The last slice may be longer than the others by this share."""

MAX_SLOWDOWN = 1.2
"""Most time per token of a slice, as a multiple of the best time per token of any slice."""


def slice_tokens(profile: PrefillProfile, request_s: float, cached: int = 0) -> int:
    """Return how many tokens to compute with one request.

    That is the least number whose time per token is within MAX_SLOWDOWN of the best, or more if
    that still takes at most SHORT_S.

    Args:
        profile: Time of the engine's passes.
        request_s: Time of a request besides its pass.
        cached: Tokens before the slice, on average.
    """
    longest = max(ALIGNMENT_TOKENS, profile.pass_tokens // ALIGNMENT_TOKENS * ALIGNMENT_TOKENS)
    seconds = {
        tokens: request_s + profile.predict(cached, tokens)
        for tokens in range(ALIGNMENT_TOKENS, longest + 1, ALIGNMENT_TOKENS)
    }
    best_s = min(s / tokens for tokens, s in seconds.items())
    least = min(t for t, s in seconds.items() if s / t <= MAX_SLOWDOWN * best_s)
    return max([least, *(t for t, s in seconds.items() if s <= SHORT_S)])


def slice_ends(first: int, end: int, num_tokens: int) -> list[int]:
    """Return the end positions of the slices of prompt tokens [first, end), ascending.

    A short rest joins the slice before it: as a slice of its own it would cost almost as much.

    Args:
        first: Position from which the prompt is computed.
        num_tokens: Tokens of a slice, at least 1. Slices shorter than ALIGNMENT_TOKENS are not
            aligned.
    """
    unit = ALIGNMENT_TOKENS if num_tokens >= ALIGNMENT_TOKENS else 1
    ends = []
    position = first
    while end - position > (1 + MAX_REST_SHARE) * num_tokens:
        position = (position + num_tokens) // unit * unit
        ends.append(position)
    return [*ends, end] if first < end else []
