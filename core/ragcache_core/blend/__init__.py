"""Cache-Craft's decisions: which stored KV to reuse, and which tokens to recompute.

- ``prefix_overlap``: how similar the chunks before a variant are, when it was computed and now.
- ``fix_overhead``: how much a chunk depends on them; both as one number, which selects a variant.
- ``observation``: what an engine measured of a variant.
- ``variant_selection``: the source of each chunk of a prompt.
- ``token_selection``: the tokens that are recomputed, their order, and their passes.

Source: Cache-Craft section 3 (SIGMOD 2025).
"""
