"""Parts of ``bench/blend_quality.py``."""
