"""Cache-Craft's decisions: which stored KV to reuse, and which tokens to recompute.

- ``prefix_chunks``: the chunks before a chunk, in the prompt and when its variant was computed.
- ``prefix_overlap``: how similar these two prefixes are.
- ``context_impact``: how much a chunk depends on the chunks before it.
- ``fix_overhead``: both as one number, which selects a variant.
- ``observation``: what an engine measured of a variant.
- ``variant_selection``: the source of each chunk of a prompt.
- ``token_ranking``: the order in which tokens are recomputed.
- ``token_selection``: the tokens that are recomputed.
- ``slices``: the passes that recompute them.
- ``focused_chunks``: the chunks that the question attends to.
- ``preload_depth``: the number of layers to load ahead.

Source: Cache-Craft section 3 (SIGMOD 2025).
"""
