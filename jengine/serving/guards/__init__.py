"""Keys, certificates, limits, and the sandbox."""
