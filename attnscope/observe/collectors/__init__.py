"""What is kept of a forward pass, one file each: what it asks of a layer, what it keeps of the answers, its texts."""
