"""A text, a chat, a sound or pictures -> a Prompt: token ids, labels, spans; an expression -> some of its tokens."""
