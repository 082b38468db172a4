"""A name or a folder -> a loaded decoder, and what its config says of it."""
