"""Models on disk: their tokenizer, their weights, and the KV space that they define."""
