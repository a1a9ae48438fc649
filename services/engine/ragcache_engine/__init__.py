"""vLLM plugin that stores the KV of retrieved chunks in the cache store and loads it back.

It works through vLLM's KV connector interface, and changes some of vLLM's objects at run time where
that does not suffice (see the README). ``plugin`` is vLLM's entry point. vLLM makes a
``connector.RagCacheConnector`` in its scheduler process and in each worker. ``scheduler`` decides
what to load and save, and ``worker`` moves the KV.
"""
