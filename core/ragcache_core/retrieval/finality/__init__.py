"""Whether the hits of a running search are final, learned online from complete searches."""
