"""The engine's process: messages, start, watchdog, replacement."""
