"""Names and descriptions of stored KV: KV spaces, keys, fingerprints and variants."""
