"""Several models in one server: which are loaded, and when."""
