"""The manifests in serving/deploy, read: their flags, ports, paths and metrics are those that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from jengine import cli
from jengine.serving.app import longest_stop
from jengine.serving.config import ServerConfig, resolve_config
from jengine.serving.metrics import PrometheusMetrics
from jengine.serving.metrics_server import pages_of
from jengine.serving.mock_engine import MockEngine

DEPLOY = Path(__file__).parent.parent.parent / "serving" / "deploy"


def manifests() -> dict[str, Any]:
    """By kind."""
    found = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def container() -> Any:
    [one] = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def server_of(arguments: list[str]) -> ServerConfig:
    """What the command makes of them."""
    options = vars(cli._parser().parse_args(["serve", *arguments]))
    return resolve_config({name: value for name, value in options.items() if name != "run"}, {})[0]


@pytest.mark.parametrize("name", ["kubernetes", "compose"])
def test_flags_and_ports(name: str) -> None:
    server = server_of(container()["args"] if name == "kubernetes" else compose()["services"]["jengine"]["command"])
    assert (server.port, server.http_port, server.metrics_port) == (50051, 8000, 9090)
    if name == "kubernetes":
        assert {port["name"]: port["containerPort"] for port in container()["ports"]} == {"grpc": 50051, "http": 8000, "metrics": 9090}
        ports = manifests()["Service"]["spec"]["ports"]
        assert {port["targetPort"]: port["port"] for port in ports} == {"grpc": 50051, "http": 8000}
        grace = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
        assert str(server.api_keys).startswith(mounts["keys"] + "/") and mounts["cache"] == "/cache"
    else:
        published = [port.split(":") for port in compose()["services"]["jengine"]["ports"]]
        assert published == [["127.0.0.1", "8000", "8000"], ["127.0.0.1", "50051", "50051"]], "without keys, for this machine only"
        grace = int(compose()["services"]["jengine"]["stop_grace_period"].removesuffix("s"))
    assert grace >= longest_stop(server), "it would be killed while it drains"


def test_probes_ask_for_what_there_is() -> None:
    pages = pages_of(PrometheusMetrics("mock", lambda: MockEngine().load, lambda: 0), lambda: None)
    probes = [container()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["port"] == "metrics" and probe["path"] in pages for probe in probes)
    [path] = re.findall(r"127\.0\.0\.1:9090(/\w+)", compose()["services"]["jengine"]["healthcheck"]["test"][-1])
    assert path in pages


def test_labels_and_names_agree() -> None:
    every = manifests()
    template = every["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert every[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert every["Service"]["spec"]["selector"].items() <= labels.items()
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9090"
    assert every["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == every["Deployment"]["metadata"]["name"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in template["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [every["PersistentVolumeClaim"]["metadata"]["name"]]
    assert template["spec"]["securityContext"]["runAsUser"] == 10001, "the image's user"


def test_mounted_files_are_there() -> None:
    services = compose()["services"]
    sources = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert [name for name in sources if name.startswith("./") and not (DEPLOY / name).is_file()] == []
    assert {name for name in sources if not name.startswith("./")} == {*compose()["volumes"]}
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]) for service in services.values() if "image" in service)
    [job] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["jengine:9090"]}]
    [source] = yaml.safe_load((DEPLOY / "grafana" / "sources.yaml").read_text())["datasources"]
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert any(volume.split(":")[1].startswith(provider["options"]["path"]) for volume in services["grafana"]["volumes"])


def test_metrics_are_exported() -> None:
    """The autoscaler's, and all that the dashboard shows."""
    registry = CollectorRegistry()
    metrics = PrometheusMetrics("mock", lambda: MockEngine().load, lambda: 0)
    metrics.http_ended("POST", "/v1/completions", 200)
    metrics.rejected("queue_full")
    registry.register(metrics)
    exported = {*re.findall(r"^([\w:]+)[{ ]", generate_latest(registry).decode(), re.MULTILINE)}
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    shown = {name for panel in board["panels"] for one in panel["targets"] for name in re.findall(r"(?:jengine:|http_)\w+", one["expr"])}
    assert len(shown) > 10 and shown <= exported, shown - exported
    [scaled] = [one["pods"]["metric"]["name"] for one in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    assert scaled.replace("_", ":", 1) in exported
