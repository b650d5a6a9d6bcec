"""OpenAI's and Anthropic's APIs over HTTP, in the server of the gRPC API."""
