"""Helpers that know no requests, models or engines: errors, checks, display, progress, GGUF files."""
