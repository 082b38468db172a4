"""Which heads carry the difference between two texts? Each is patched from the other."""
