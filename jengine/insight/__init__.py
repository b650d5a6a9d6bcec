"""What looks at a running engine."""
