"""The local runtime: a RagCache as supervised processes of this machine."""
