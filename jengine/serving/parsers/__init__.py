"""Parsers for tool calls and reasoning in a model's text, incremental."""
