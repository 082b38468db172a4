"""What is asked of a text -> its tokens: what was given, and what a model makes of it."""
