"""What `scripts/fuzz.py` is made of: kinds of hostile input, one file for each group of them.

`words` and `made` are what kinds are made from, `trying` runs a command in a fork, `judging` says what is wrong with
how it ended. A new kind is a function with `@kind` in the file of its group.
"""
