"""OpenAI's API over HTTP, beside gRPC: the extra `http`."""
