"""The work of a shard with its peers: deletes that it missed, and replicas of hot variants."""
