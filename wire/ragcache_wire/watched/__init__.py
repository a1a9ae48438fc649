"""Files that may change while a process runs: shard members and signing keys."""
