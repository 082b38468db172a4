"""A text or a chat -> a Prompt: token ids, readable labels, and the spans of words, sentences and turns."""
