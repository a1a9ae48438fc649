"""One module for each command of ``ragcache``, and what they print with."""
