"""Decisions among several engines and shards: sharding, replication, handoff, deletes."""
