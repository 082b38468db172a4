"""What is kept of a forward pass: how layers are asked for it, the records of it and their tables, the request."""
