"""When requests run: background prefills and their slices, idle gaps, and ``Retry-After``."""
