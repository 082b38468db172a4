"""Folders that runs write into: what fills one, the parts kept in it, a journal, the manifest of one text's run."""
