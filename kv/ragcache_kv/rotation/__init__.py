"""Rotates keys by a difference of positions, so that a chunk can be reused at any position.

``key_rotation`` is the interface. ``rope`` reads a model's rotation from its config.json, and
computes cosines and sines. ``frequencies`` has the formulas of each scaling. ``cpu`` rotates on the
CPU, ``device`` on a GPU.
"""

from ragcache_kv.rotation.key_rotation import KeyRotation
from ragcache_kv.rotation.rope import Pairing, Rope, read_rope

__all__ = ["KeyRotation", "Pairing", "Rope", "read_rope"]
