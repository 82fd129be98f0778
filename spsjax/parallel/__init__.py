"""Meshes, sharding of weights and caches, several processes."""
