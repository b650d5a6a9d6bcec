"""The steps that all protocols share, from a parsed request to its last answer."""
