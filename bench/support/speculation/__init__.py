"""A retriever that repeats recorded searches, and a gateway to ask questions of."""
