"""External judges: a NAME.toml that describes each, a NAME.py that runs in its environment, and what they found.

`driver` makes the environments and keeps the results, `document` writes docs/external.md with its tables, and `common`
is for the judges.
"""
