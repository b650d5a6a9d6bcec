"""Programs: compiled, saved, loaded and run; the cache on the device."""
