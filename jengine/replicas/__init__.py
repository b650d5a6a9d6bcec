"""Several engines of the same model that answer as one."""
