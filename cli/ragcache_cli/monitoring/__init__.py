"""The live view of a running platform."""
