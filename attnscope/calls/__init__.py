"""What `attnscope.scan`, `ablate`, `compare`, `batch`, `parity` and `explain` do: one model in, a record out.

The commands of these names parse their options, call what lies here, and print. Each record has a `table()` that goes
into pandas, polars and DuckDB, a `figure()` that a notebook shows, and `export(folder)`, which writes both.
"""
