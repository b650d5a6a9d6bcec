"""Where pages of keys and values are kept outside an engine: on a disk, in memory, or by another process."""
