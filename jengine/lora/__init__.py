"""vLLM's module of the same name; see `request`."""
