"""The manifests in serving/deploy: their flags, ports, paths and metrics exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from jengine import StepTotals, cli
from jengine.serving.app import longest_stop
from jengine.serving.config import ServerConfig, resolve_config
from jengine.serving.metrics import PrometheusMetrics
from jengine.serving.metrics_server import pages_of
from jengine.serving.mock_engine import MockEngine

DEPLOY = Path(__file__).parent.parent.parent / "serving" / "deploy"


def manifests() -> dict[str, Any]:
    """The manifests, by kind."""
    found = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def container() -> Any:
    [one] = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def server_of(arguments: list[str]) -> ServerConfig:
    """The options that result from the command."""
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
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    [job], [rules] = prometheus["scrape_configs"], prometheus["rule_files"]
    assert f"./alerts.yaml:/etc/prometheus/{rules}:ro" in services["prometheus"]["volumes"]
    assert job["static_configs"] == [{"targets": ["jengine:9090"]}]
    [source] = yaml.safe_load((DEPLOY / "grafana" / "sources.yaml").read_text())["datasources"]
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert any(volume.split(":")[1].startswith(provider["options"]["path"]) for volume in services["grafana"]["volumes"])


def test_metrics_are_exported() -> None:
    """The autoscaler's, and all that the dashboard and the alerts show."""
    registry = CollectorRegistry()
    load = MockEngine().load._replace(decisions=(("throughput: most tokens a second", 1),))
    totals = StepTotals(steps={"8+1": 1}, seconds={"wait": 1.0})
    metrics = PrometheusMetrics("mock", lambda: load, lambda: 0, lambda: totals)
    metrics.certificate_expiry = lambda: 2e9
    metrics.http_ended("POST", "/v1/completions", 200)
    metrics.rpc_ended("/jengine.v1.GenerateService/Generate", grpc.StatusCode.OK)
    metrics.rejected("queue_full")
    metrics.request_over("anna", "OK", 1, 1)
    registry.register(metrics)
    exported = {*re.findall(r"^([\w:]+)[{ ]", generate_latest(registry).decode(), re.MULTILINE)}
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    shown = {name for panel in board["panels"] for one in panel["targets"] for name in re.findall(r"(?:jengine:|http_)\w+", one["expr"])}
    assert len(shown) > 30 and shown <= exported, shown - exported
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    watched = {name for rule in rules for name in re.findall(r"(?:jengine:|http_|grpc_)[\w:]+(?=[{\[ ]|$)", rule["expr"])}
    codes = {"grpc_code"}
    assert len(watched) > 8 and watched - codes <= exported | recorded, watched - exported
    [scaled] = [one["pods"]["metric"]["name"] for one in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    assert scaled.replace("_", ":", 1) in exported


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool (Debian: prometheus)")
def test_alerts() -> None:
    test = Path(__file__).parent / "alerts_test.yaml"
    for arguments in (["check", "rules", str(DEPLOY / "alerts.yaml")], ["test", "rules", str(test)]):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
