"""OpenAI's API over HTTP, in the server of the gRPC API. Needs the extra `http`."""
