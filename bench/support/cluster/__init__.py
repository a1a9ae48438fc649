"""The whole platform with real or simulated engines, and what drives it."""
