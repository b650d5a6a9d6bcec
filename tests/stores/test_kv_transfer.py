"""The option kv_transfer_config: vLLM's fields where they mean the same, the others rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.kv_transfer import KvTransfer

DISK: dict[str, Any] = {"kv_connector": "disk", "kv_connector_extra_config": {"root_dir": "pages"}}
SOCKETS: dict[str, Any] = {"kv_connector": "sockets", "kv_role": "kv_producer"}


def test_what_it_says() -> None:
    assert KvTransfer.of(None) is KvTransfer.of({}) is None
    disk = KvTransfer.of(json.dumps(DISK))
    assert disk is not None and disk.keeps and disk.loads and disk.root_dir == Path("pages")
    extra = {"peers": ["a:1", "b:*", "[::1]:7"], "kv_lease_duration": 9, "load_timeout": 0.5}
    both = KvTransfer.of(
        {**SOCKETS, "kv_role": "kv_both", "kv_connector_extra_config": extra, "kv_buffer_size": 2e9}
    )
    assert both is not None and (both.lease, both.load_timeout, both.buffer_bytes) == (9.0, 0.5, 2 * 10**9)
    peers = {"a:1": True, "a:2": False, "b:1": True, "b:99": True, "c:1": False, "[::1]:7": True}
    assert {peer: both.is_peer(peer) for peer in peers} == peers
    producer = KvTransfer.of({**SOCKETS, "kv_connector_extra_config": {"peers": ["a:1"]}})
    assert producer is not None and not producer.is_peer("a:1") and producer.address == ("127.0.0.1", 14579)
    # vLLM's fields whose value is the only one here
    assert KvTransfer.of({**DISK, "kv_load_failure_policy": "recompute", "kv_buffer_device": "cpu"}) == disk


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "kv_transfer_config='{': must be a JSON object"),
        ([1], "must be an object"),
        ({"kv_role": "kv_both"}, "kv_connector=None: must be one of disk, remote, sockets"),
        (
            {"kv_connector": "OffloadingConnector"},
            "instead of OffloadingConnector: swap_space for host memory",
        ),
        ({**DISK, "kv_role": "both"}, "kv_role='both': must be kv_producer or kv_consumer or kv_both"),
        ({**DISK, "kv_load_failure_policy": "fail"}, "must be recompute"),
        ({**DISK, "kv_rank": 0}, "kv_rank=0: must be left out: engines find each other"),
        ({**DISK, "kv_connector_module_path": "x"}, "connectors are part of jengine"),
        ({**DISK, "kv_port": 1}, "kv_port=1: unknown with kv_connector=disk"),
        ({**DISK, "more": 1}, "more=1: unknown with kv_connector=disk"),
        ({"kv_connector": "disk"}, r"root_dir=None: must be a folder"),
        (
            {**DISK, "kv_connector_extra_config": {"root_dir": "x", "max_bytes": "many"}},
            "max_bytes='many': must be a number of bytes",
        ),
        (
            {**DISK, "kv_connector_extra_config": {"root_dir": "x", "load_timeout": 0}},
            r"load_timeout=0: must be seconds in \(0, 3600\]",
        ),
        ({**SOCKETS, "kv_role": "kv_consumer"}, "peers=.*: must name the producers"),
        ({**SOCKETS, "kv_connector_extra_config": {"peers": ["host"]}}, "peers='host': must be host:port"),
        ({**SOCKETS, "kv_connector_extra_config": {"peers": [":*"]}}, "must be host:port"),
        ({**SOCKETS, "kv_port": 70000}, "kv_port=70000: must be a whole number"),
        ({**SOCKETS, "kv_buffer_size": 0}, "kv_buffer_size=0: must be a number of bytes"),
        ({"kv_connector": "remote", "kv_port": 0}, "kv_port=0: must be a whole number, at least 1"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KvTransfer.of(given)
