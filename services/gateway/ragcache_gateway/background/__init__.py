"""Work that engines do in idle windows: precomputing chunks and quality trials."""
