"""Several engines of one model that answer as one."""
