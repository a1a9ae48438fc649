"""Background tasks of a store: writes to disk, promotions, re-encoding, housekeeping."""
