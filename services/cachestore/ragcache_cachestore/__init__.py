"""The cache store: keeps variants by chunk and prefix, in memory and on disk."""
