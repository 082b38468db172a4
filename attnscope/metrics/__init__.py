"""What is kept of a layer: metrics, roles, relations, maps, rollout."""
