"""OpenAI's Responses API, without state: the server keeps no response."""
