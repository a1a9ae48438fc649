"""Keys moved to another position: rotated by the difference, so that a chunk is reused anywhere.

``rope`` reads a model's rotation from its config.json, ``frequencies`` has the formulas of every
scaling, ``turn`` makes cosines and sines of a difference. ``key_rotation`` is the face of it all;
``processor`` rotates on the CPU, ``device`` on a GPU.
"""

from ragcache_kv.rotation.key_rotation import KeyRotation
from ragcache_kv.rotation.rope import Pairing, Rope, read_rope

__all__ = ["KeyRotation", "Pairing", "Rope", "read_rope"]
