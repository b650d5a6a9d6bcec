"""Models' texts made into answers: tool calls and reasoning, as they come."""
