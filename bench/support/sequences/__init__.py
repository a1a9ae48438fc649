"""Access sequences that ``bench/sequence.py`` replays, and what it makes of the replies."""
