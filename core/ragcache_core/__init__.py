"""What RagCache decides, as pure functions and values: keys, prompts, plans, policies.

Standard library and numpy only; no I/O, clocks or randomness of its own: both are passed in.
"""
