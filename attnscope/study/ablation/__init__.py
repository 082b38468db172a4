"""What is lost without heads: sets and tasks, shared passes, effects, and other questions to the same heads."""
