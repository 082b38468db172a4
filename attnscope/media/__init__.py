"""What is read beside a text or in its stead: a file -> what a model is given of it, and a Prompt of its tokens."""
