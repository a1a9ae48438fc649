"""Replicas of the retriever: one writes, chosen by a Lease, and the others follow its changes."""
