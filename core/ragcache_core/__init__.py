"""The decisions of RagCache as pure functions and values: keys, prompts, plans, policies.

Uses only the standard library and numpy. It has no I/O, clock or randomness of its own: the caller
passes times and random numbers.
"""
