"""Which retrieved text supports a sentence of an answer."""
