"""The RagCache object: its typed spec, and the Kubernetes objects that follow from it.

Nothing here is in the data path. The same builders serve a cluster and ``ragcache up``.
"""
