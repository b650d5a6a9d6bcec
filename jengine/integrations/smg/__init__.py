"""jengine as a worker of the gateway smg (the extra `smg`): one more gRPC service of `jengine serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jengine import InvalidArgument

if TYPE_CHECKING:
    from jengine.serving.config import ServerConfig
    from jengine.serving.grpc.server import AddedService


def added_services(server: ServerConfig) -> list[AddedService]:
    """smg's worker service, if the options ask for it.

    Raises:
        InvalidArgument: the extra is not installed.
    """
    if not server.smg_api:
        return []
    try:
        from jengine.integrations.smg.service import smg_service
    except ModuleNotFoundError as missing:
        raise InvalidArgument.needs_extra("smg_api", True, "smg", missing) from None
    return [smg_service]
