"""The seam: a model's own attention calls, heard while it runs, and who computes them."""
