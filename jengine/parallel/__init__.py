"""Meshes, collectives, and the link between processes."""
