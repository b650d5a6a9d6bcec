"""Clients of `jengine serve`, blocking and asyncio: `from jengine.client import Client`."""

from __future__ import annotations

from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServedOutput, ServerError, Usage

__all__ = ["AsyncClient", "Client", "Retries", "ServedOutput", "ServerError", "Usage"]
