"""The field `kv_transfer_params`, by which a router lets one server compute a prompt and another answer it.

The protocol is vLLM's: the first server's request has do_remote_decode, and its answer says in the same field
where the pages are; the router gives these to the second server. Pages are found by their contents, so no
other fields are needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jengine import InvalidArgument
from jengine.serving.calls.model_provider import PagesInfo

NAME = "kv_transfer_params"
UNUSED = ("remote_engine_id", "remote_block_ids", "remote_request_id", "tp_size")
KNOWN = ("do_remote_decode", "do_remote_prefill", "remote_host", "remote_port", *UNUSED)
Params = Mapping[str, Any]


def pages_from(params: Params | None, info: PagesInfo) -> str | None:
    """Where the pages of a request's prompt are, as host:port; None: nowhere else.

    Raises:
        InvalidArgument: this server does not support these parameters.
    """
    if params is None:
        return None
    for name, value in params.items():
        if name not in KNOWN:
            raise InvalidArgument(f"{NAME}.{name}", value, f"unknown; known: {', '.join(KNOWN)}")
    for name in KNOWN[:2]:
        if not isinstance(params.get(name), bool | None):
            raise InvalidArgument(f"{NAME}.{name}", params[name], "must be true or false")
    decode, prefill = map(params.get, KNOWN[:2])
    if decode and prefill:
        raise InvalidArgument(f"{NAME}.do_remote_decode", True, "must be false with do_remote_prefill")
    if decode and info.at is None:
        limit = "needs an engine with kv_connector=sockets and kv_role=kv_producer or kv_both"
        raise InvalidArgument(f"{NAME}.do_remote_decode", True, limit)
    if not prefill:
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port):
        port = int(port)
    if not isinstance(host, str) or not host or type(port) is not int:
        raise InvalidArgument(f"{NAME}.remote_host", f"{host}:{port}", "needs remote_host and remote_port")
    if not 0 < port < 65536:
        raise InvalidArgument(f"{NAME}.remote_port", port, "must be from 1 to 65535")
    address = f"{host}:{port}"
    if address not in info.peers and f"{host}:*" not in info.peers:
        limit = "is none of the peers in this engine's kv_transfer_config"
        raise InvalidArgument(f"{NAME}.remote_host", address, limit)
    return address


def answer_of(params: Params | None, info: PagesInfo) -> dict[str, Any] | None:
    """The field in the answer of a server that has computed a prompt for another one."""
    if params is None or not params.get("do_remote_decode") or info.at is None:
        return None
    host, _, port = info.at.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": info.engine_id,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": int(port),
    }
