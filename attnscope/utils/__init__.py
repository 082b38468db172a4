"""What every room may use: files, tables, memory, signals, text from strangers, calls of foreign code."""
