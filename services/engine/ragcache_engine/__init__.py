"""vLLM plugin: keeps the KV of retrieved chunks in the cache store and loads it back.

Works with an unpatched vLLM through its KV connector interface. ``plugin`` is vLLM's entry point,
``connector`` the class vLLM makes; everything it decides lives in ``scheduler_side`` (which
variants to load and save) and everything it moves in ``worker_side``.
"""
