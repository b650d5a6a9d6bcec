"""The gRPC services and clients, and conversions to and from protobuf."""
