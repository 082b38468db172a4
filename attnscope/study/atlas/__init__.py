"""The atlas of a model: probes, what heads score on them, roles, and where an atlas is read."""
