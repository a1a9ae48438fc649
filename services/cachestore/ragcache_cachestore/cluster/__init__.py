"""The work of a shard with its peers: deletes that it missed, and copies of hot variants."""
