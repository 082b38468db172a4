"""What is read beside a text: a file -> what a model is given of it, and a Prompt that knows its tokens."""
