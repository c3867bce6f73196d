"""Mesh and sharding rules. Knows nothing of models or formats."""
