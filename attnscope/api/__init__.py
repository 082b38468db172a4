"""The calls of `import attnscope`, one file each: a model and options in, a record out.

The commands of these names parse their options, call what lies here, and print. Each record has a `table()` that goes
into pandas, polars and DuckDB, a `figure()` that a notebook shows, and `export(folder)`, which writes both.
"""
