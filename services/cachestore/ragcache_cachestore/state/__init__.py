"""What a store knows of its variants, leases and deletes, in memory and under one lock."""
