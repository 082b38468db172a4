"""Prompts in, observations out: what is asked, the pass, a collector per file, and the record of a text."""
