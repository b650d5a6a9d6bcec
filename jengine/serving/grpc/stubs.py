"""Clients' stubs of services, made from their descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from jengine.serving.generated.jengine.v1 import generate_pb2


class Stub:
    """Has a function for each method of a service, as the classes that protoc generates.

    Args:
        channel: of grpc or grpc.aio.
    """

    SERVICE: ServiceDescriptor

    def __init__(self, channel: Any) -> None:
        for method in self.SERVICE.methods:
            kind = "_".join(
                "stream" if streams else "unary"
                for streams in (method.client_streaming, method.server_streaming)
            )
            call = getattr(channel, kind)(
                f"/{self.SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.SERVICE.full_name} has no method {name}")


class GenerateServiceStub(Stub):
    SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]
