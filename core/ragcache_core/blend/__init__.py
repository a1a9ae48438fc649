"""Cache-Craft's decisions (SIGMOD 2025, §3), without an engine: which KV to reuse, what to repair.

``prefix`` has the chunks before a chunk, then and now. ``prefix_overlap`` says how alike they are,
``context_impact`` how much a chunk leans on what was before it, and ``fix_overhead`` makes one
number of both, by which a variant is taken; ``calibration`` finds its scale for a wanted quality,
``quality_control`` from questions asked again, which ``question_reservoir`` keeps and ``rouge``
compares. ``observation`` is what an engine saw of a chunk, and ``blending`` puts a prompt together
by all this. ``need`` puts tokens in order, ``recomputation`` chooses among them, ``slices`` cuts
them into passes, ``focused_chunks`` lets go of chunks that the question does not look at,
``preloading`` says how many layers to load ahead.
"""
