"""Keys and buckets of programs, and which of them are ready."""
