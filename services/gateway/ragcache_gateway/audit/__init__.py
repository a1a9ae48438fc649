"""The audit log of one gateway."""
