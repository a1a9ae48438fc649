"""KV values outside the engine: their layout as bytes, their checksum."""
