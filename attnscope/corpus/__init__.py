"""Many texts -> a dataset: reading, batching, measuring, writing, and never losing work."""
