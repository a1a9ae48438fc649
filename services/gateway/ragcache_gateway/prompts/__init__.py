"""The prompt of a question: tokenizer, chat template, passages, and how its KV may be reused."""
