"""What an engine records about its steps and requests."""
