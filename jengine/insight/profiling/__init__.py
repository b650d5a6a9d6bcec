"""Profiles of processes: threads, locks, memory, garbage collection, system calls."""
