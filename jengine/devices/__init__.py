"""Properties and defaults of devices."""
