"""One change to a model's attention while it runs: where, what instead, the passes that run it, what they measure."""
