"""What a model reads that is no text: a file, or an array -> what stands in a Prompt."""
