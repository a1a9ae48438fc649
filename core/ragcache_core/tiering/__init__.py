"""Which variants are read often, the precision that each is stored in, and its memory tier.

``precision_policy`` has the grades that users set. ``precision_assignment`` counts reads and has
the interface and HA-RAG's algorithms. ``score_assignment`` minimizes bytes under a bound on the
error.
``tier_placement`` assigns values to the memory tiers of an engine.
"""
