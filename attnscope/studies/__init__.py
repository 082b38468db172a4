"""Studies over many sequences: what each head does, how sure we are, and whether it matters."""
