"""What is read with a text or instead of it: a file -> what a model is given of it, and a Prompt of its tokens."""
