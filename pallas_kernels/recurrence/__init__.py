"""Linear attention with a state in place of a cache."""
