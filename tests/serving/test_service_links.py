"""JENGINE_* variables that Kubernetes sets for Services are ignored; misspelt options are still rejected."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from jengine import EngineConfig, InvalidArgument
from jengine.serving.config import PREFIX, SERVE_DEFAULTS, ServerConfig, resolve_config, service_links
from jengine.serving.grpc import health_check
from tests.serving.processes import CODE, process

# As kubelet writes them for Services named jengine, jengine-metrics and jengine-0.
LINKS = {
    "JENGINE_SERVICE_HOST": "10.96.12.7",
    "JENGINE_SERVICE_PORT": "50051",
    "JENGINE_SERVICE_PORT_GRPC": "50051",
    "JENGINE_SERVICE_PORT_HTTP_METRICS": "9090",
    "JENGINE_PORT": "tcp://10.96.12.7:50051",
    "JENGINE_PORT_50051_TCP": "tcp://10.96.12.7:50051",
    "JENGINE_PORT_50051_TCP_PROTO": "tcp",
    "JENGINE_PORT_50051_TCP_PORT": "50051",
    "JENGINE_PORT_50051_TCP_ADDR": "10.96.12.7",
    "JENGINE_PORT_53_UDP": "udp://10.96.12.7:53",
    "JENGINE_PORT_53_UDP_PROTO": "udp",
    "JENGINE_METRICS_SERVICE_HOST": "fd00::17",
    "JENGINE_METRICS_SERVICE_PORT": "9090",
    "JENGINE_METRICS_PORT": "tcp://[fd00::17]:9090",
    "JENGINE_METRICS_PORT_9090_TCP": "tcp://[fd00::17]:9090",
    "JENGINE_METRICS_PORT_9090_TCP_ADDR": "fd00::17",
    "JENGINE_0_PORT": "sctp://10.96.12.8:1",
    "JENGINE_0_PORT_1_SCTP_PORT": "1",
}


def test_service_links_are_ignored() -> None:
    given = {"JENGINE_MODEL": "demo", "JENGINE_MAX_WAITING": "3", **LINKS}
    assert resolve_config({}, given) == (
        ServerConfig(max_waiting=3),
        EngineConfig(model="demo", **SERVE_DEFAULTS),
    )
    assert service_links({"PATH": "/bin", "REDIS_SERVICE_HOST": "10.0.0.1", **given}, PREFIX) == sorted(LINKS)


@pytest.mark.parametrize(
    "variable, text",
    [
        ("JENGINE_PROT", "1"),
        ("JENGINE_PORT", "tcp:50051"),
        ("JENGINE_PORT", "http://10.96.12.7:50051"),
        ("JENGINE_METRICS_PORT", "grpc"),
        ("JENGINE_PORT_50051", "50051"),
        ("JENGINE_PORT_50051_TCP", "yes"),
        ("JENGINE_PORT_GRPC_TCP", "tcp://10.96.12.7:50051"),
        ("JENGINE_PORT_50051_TCP_NAME", "x"),
        ("JENGINE_SERVICE_PORT", "tcp"),
        ("JENGINE_SERVICE_HOSTS", "10.96.12.7"),
        ("JENGINE_SERVICE_NAME", "x"),
        ("JENGINE_SERVICEPORT", "50051"),
    ],
)
def test_what_only_looks_like_one_is_refused(variable: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolve_config({"model": "demo"}, {variable: text})
    assert refused.value.field == variable


def test_a_real_port_is_still_an_option() -> None:
    server, _ = resolve_config({"model": "demo"}, {"JENGINE_PORT": "5000", "JENGINE_METRICS_PORT": "9090"})
    assert (server.port, server.metrics_port) == (5000, 9090)


def test_the_health_check_of_a_server_without_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JENGINE_PORT", "none")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("JENGINE_GRPC_PORT", str(server.getsockname()[1]))
        assert health_check.main() == 0
    assert health_check.main() == 1
    dialled: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, _: dialled.append(address) or server)
    for port in ("auto", "tcp://10.96.12.7:50051"):
        monkeypatch.setenv("JENGINE_GRPC_PORT", port)
        assert health_check.main() == 0 and dialled.pop() == ("127.0.0.1", 50051)


def test_the_log_names_those_that_were_ignored() -> None:
    arguments = json.dumps(
        [{"port": None, "grpc_port": 0}, "tests.serving.faulty_engines:exits", {"code": 3}]
    )
    with process(
        ["env", "JENGINE_PORT=tcp://10.96.12.7:50051", sys.executable, "-c", CODE, arguments]
    ) as server:
        assert server.wait()[0] == 1
        assert "service links, not options, and are ignored: JENGINE_PORT\n" in server.log
