"""A model compared with the oracle: layer by layer, as a whole, and as a certificate in JSON."""
