"""The ``ragcache`` command: run a RagCache on this machine, fill it, ask it, look at it."""
