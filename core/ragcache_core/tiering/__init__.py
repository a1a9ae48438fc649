"""Which variants are hot, and what follows: the precision each is held in, and where (DESIGN §1).

``counts`` says how hot, ``assignment`` is the interface with HA-RAG's answer and a fixed one,
``score`` is our own answer under a quality bound, and ``fidelity`` says what can still be done with
what is held: precision that was lost does not come back.
"""
