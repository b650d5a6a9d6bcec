"""The network: a gRPC service around the engine, using jengine's public names only."""
