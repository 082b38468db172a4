"""What does a smaller KV cache cost? Heads keep some keys of each row, and a text or its answer shows what is lost."""
