"""Which variants are read often, the precision that each is stored in, and its memory tier.

``precision_assignment`` counts reads and has the interface, HA-RAG's algorithms and a fixed
assignment. ``score_assignment`` minimizes bytes under a bound on the error. ``tier_placement``
assigns values to the memory tiers of an engine.

Not reachable from a RagCache yet: it sets no lossy precision and no policy of an engine's tiers.
"""
