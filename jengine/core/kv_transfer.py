"""The option `kv_transfer_config`: where pages are kept outside the engine, and who fetches them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_number, check_whole, parse_bytes, parse_object
from jengine.stores.frames import read_token

NAME = "kv_transfer_config"
EXTRA = "kv_connector_extra_config"
PORT = 14579  # vLLM's default
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Connector = Literal["disk", "remote", "sockets"]
Address = tuple[str, int]
NOT_HERE = {
    "kv_connector_module_path": "must be left out: connectors are part of jengine",
    "kv_rank": "must be left out: engines find each other by their addresses",
    "kv_parallel_size": "must be left out: engines find each other by their addresses",
    "enable_permute_local_kv": "must be left out: pages have one layout",
}
OTHERS = {  # vLLM's connectors, and what does the same here
    "SharedStorageConnector": "disk",
    "ExampleConnector": "disk",
    "OffloadingConnector": "swap_space for host memory, or disk",
    "NixlConnector": "sockets",
    "P2pNcclConnector": "sockets",
    "MooncakeConnector": "sockets",
    "LMCacheConnectorV1": "disk or remote",
    "MooncakeStoreConnector": "remote",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """A checked `kv_transfer_config`. Names as in vLLM.

    Attributes:
        connector: disk: a folder; remote: a page server; sockets: engines that compute prompts serve their
            pages, and others fetch these.
        role: kv_producer: pages are kept; kv_consumer: they are looked up; kv_both.
        address: of the page server; with sockets, where a producer listens. Port 0: any free one.
        peers: with sockets, the producers from which a consumer may fetch, as host:port; host:* is any port.
        root_dir, max_bytes: of the disk.
        token_file: a file with the token; None: it is in the environment variable
            JENGINE_KV_TOKEN.
        buffer_bytes: with sockets, pages that a producer keeps for others.
        lease: with sockets, seconds that a page is certain to be kept, unless it is fetched before.
        load_timeout: the most seconds that a request waits for pages.
        engine_id: a name for routers.
    """

    connector: Connector
    role: Role = "kv_both"
    address: Address = ("127.0.0.1", PORT)
    peers: tuple[str, ...] = ()
    root_dir: Path | None = None
    max_bytes: int = 10 << 30
    token_file: Path | None = None
    buffer_bytes: int = 10**9
    lease: float = 30.0
    load_timeout: float = 5.0
    engine_id: str | None = None

    @property
    def keeps(self) -> bool:
        """Whether it keeps pages for later, or for others."""
        return self.role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether it looks pages up."""
        return self.role != "kv_producer"

    def is_peer(self, address: str) -> bool:
        """Whether pages may be fetched from this host:port."""
        return self.loads and (address in self.peers or f"{address.rpartition(':')[0]}:*" in self.peers)

    def token(self) -> bytes:
        """What clients and servers of pages share. Raises as `read_token`."""
        return read_token(self.token_file, f"{NAME}.{EXTRA}.token_file")

    @classmethod
    def of(cls, value: Mapping[str, Any] | str | None) -> KvTransfer | None:
        """Reads the option: an object, or one as JSON.

        Raises:
            InvalidArgument: naming the field and its limit.
        """
        fields = _object(NAME, value)
        if not fields:
            return None
        connector = fields.pop("kv_connector", None)
        if connector not in get_args(Connector):
            instead = f"; instead of {connector}: {OTHERS[connector]}" if connector in OTHERS else ""
            limit = f"must be one of {', '.join(get_args(Connector))}{instead}"
            raise InvalidArgument(f"{NAME}.kv_connector", connector, limit)
        for name, limit in NOT_HERE.items():
            if name in fields:
                raise InvalidArgument(f"{NAME}.{name}", fields[name], limit)
        extra = _object(f"{NAME}.{EXTRA}", fields.pop(EXTRA, None))
        role = _one_of("kv_role", fields.pop("kv_role", "kv_both"), get_args(Role))
        _one_of("kv_load_failure_policy", fields.pop("kv_load_failure_policy", "recompute"), ("recompute",))
        _one_of("kv_buffer_device", fields.pop("kv_buffer_device", "cpu"), ("cpu",))
        values = _top(connector, role, fields) | _more(connector, role, extra)
        for where, left in ((NAME, fields), (f"{NAME}.{EXTRA}", extra)):
            for name, field in left.items():
                raise InvalidArgument(f"{where}.{name}", field, f"unknown with kv_connector={connector}")
        return cls(connector=connector, role=role, **values)


def _top(connector: str, role: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields beside the extra ones."""
    values: dict[str, Any] = {"engine_id": _text(f"{NAME}.engine_id", fields.pop("engine_id", None))}
    if connector == "disk" or (connector == "sockets" and role == "kv_consumer"):
        return values
    host, port = fields.pop("kv_ip", "127.0.0.1"), fields.pop("kv_port", PORT)
    _text(f"{NAME}.kv_ip", host)
    check_whole(f"{NAME}.kv_port", port, 0 if connector == "sockets" else 1, 65535)
    values["address"] = host, port
    if connector == "sockets":
        size = fields.pop("kv_buffer_size", 1e9)
        check_number(f"{NAME}.kv_buffer_size", size, 1.0, math.inf, "a number of bytes, at least 1")
        values["buffer_bytes"] = int(size)
    return values


def _more(connector: str, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Takes the extra fields."""
    where, values = f"{NAME}.{EXTRA}", dict[str, Any]()

    def seconds(name: str) -> float:
        number = extra.pop(name)
        check_number(f"{where}.{name}", number, 0.0, 3600.0, "seconds in (0, 3600]", open_low=True)
        return float(number)

    if "load_timeout" in extra:
        values["load_timeout"] = seconds("load_timeout")
    if connector == "disk":
        folder = _text(f"{where}.root_dir", extra.pop("root_dir", None))
        if not folder:
            raise InvalidArgument(f"{where}.root_dir", folder, "must be a folder")
        values["root_dir"] = Path(folder)
        if (size := parse_bytes(f"{where}.max_bytes", extra.pop("max_bytes", None))) is not None:
            values["max_bytes"] = size
        return values
    if (file := _text(f"{where}.token_file", extra.pop("token_file", None))) is not None:
        values["token_file"] = Path(file)
    if connector == "sockets":
        if "kv_lease_duration" in extra:
            values["lease"] = seconds("kv_lease_duration")
        peers = extra.pop("peers", [])
        if not isinstance(peers, list | tuple):
            raise InvalidArgument(f"{where}.peers", peers, "must be a list of host:port")
        for peer in peers:
            if not (isinstance(peer, str) and peer.removesuffix(":*") not in ("", peer)):
                address_of(f"{where}.peers", peer)
        values["peers"] = tuple(peers)
        if role == "kv_consumer" and not peers:
            raise InvalidArgument(f"{where}.peers", peers, "must name the producers, as host:port")
    return values


def address_of(name: str, value: object) -> Address:
    """Reads host:port.

    Raises:
        InvalidArgument: it is something else.
    """
    host, _, port = str(value).rpartition(":")
    if not isinstance(value, str) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(name, value, "must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _object(name: str, value: Any) -> dict[str, Any]:
    """The fields that are set."""
    return {key: field for key, field in parse_object(name, value).items() if field is not None}


def _text(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidArgument(name, value, "must be text")
    return value


def _one_of[T](name: str, value: T, known: tuple[T, ...]) -> T:
    if value not in known:
        raise InvalidArgument(f"{NAME}.{name}", value, f"must be {' or '.join(map(str, known))}")
    return value
