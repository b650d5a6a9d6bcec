"""The manifests in serving/deploy: their flags, ports, paths and metrics exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from jengine import __version__, cli
from jengine.serving.config import ServerConfig, resolve_config
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics, pages_of
from jengine.spi import StepTotals
from tests.mocks.mock_engine import MockEngine
from tests.serving.helm_templates import rendered
from tests.serving.processes import longest_stop

DEPLOY = Path(__file__).parent.parent.parent / "serving" / "deploy"


OVERLAYS = "cpu", "nvidia-gpu", "shared-cache"


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge, as far as our patches need it: lists of named objects are merged by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {
            **base,
            **{name: merged(base[name], value) if name in base else value for name, value in patch.items()},
        }
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in one for one in [*base, *patch]):
        old, new = ({one["name"]: one for one in these} for these in (base, patch))
        assert old.keys() >= new.keys(), "a patch names nothing of the base"
        return [merged(one, new[name]) if name in new else one for name, one in old.items()]
    return patch


def kustomized(folder: Path) -> dict[str, Any]:
    """What `kubectl kustomize` prints for a folder, by kind. Every file that it names must exist, and every
    file must be named.
    """
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert own.keys() <= {"apiVersion", "kind", "resources", "components", "patches", "images"}
    assert (own["kind"], own["apiVersion"]) in {
        ("Kustomization", "kustomize.config.k8s.io/v1beta1"),
        ("Component", "kustomize.config.k8s.io/v1alpha1"),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name in own.get("resources", []):
        path = folder / name
        new = kustomized(path) if path.is_dir() else {(one := yaml.safe_load(path.read_text()))["kind"]: one}
        assert not found.keys() & new.keys()
        found |= new
    patches = [folder / one["path"] for one in own.get("patches", [])]
    for name in own.get("components", []):
        part = yaml.safe_load((folder / name / "kustomization.yaml").read_text())
        assert part["kind"] == "Component"
        found |= {
            (one := yaml.safe_load((folder / name / file).read_text()))["kind"]: one
            for file in part["resources"]
        }
        patches += [folder / name / one["path"] for one in part["patches"]]
    for path in patches:
        patch = yaml.safe_load(path.read_text())
        assert patch["metadata"]["name"] == found[patch["kind"]]["metadata"]["name"]
        found[patch["kind"]] = merged(found[patch["kind"]], patch)
    for image in own.get("images", []):
        for one in found["Deployment"]["spec"]["template"]["spec"]["containers"]:
            if one["image"] == image["name"]:
                one["image"] = f"{image['newName']}:{image['newTag']}"
    named = {
        *own.get("resources", []),
        *(one["path"] for one in own.get("patches", [])),
        "kustomization.yaml",
    }
    assert {file.name for file in folder.iterdir()} <= named | {Path(name).name for name in named}
    return found


def manifests(overlay: str = "cpu") -> dict[str, Any]:
    """The manifests of an overlay, by kind."""
    return kustomized(DEPLOY / "kubernetes" / "overlays" / overlay)


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def container(overlay: str = "cpu") -> Any:
    [one] = manifests(overlay)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def server_of(arguments: list[str]) -> ServerConfig:
    """The options that result from the command."""
    options = vars(cli._parser().parse_args(["serve", *arguments]))
    return resolve_config({name: value for name, value in options.items() if name != "run"}, {})[0]


def test_the_inference_pool_selects_the_pods() -> None:
    pool = yaml.safe_load((DEPLOY / "inference-pool.yaml").read_text())["spec"]
    pod = kustomized(DEPLOY / "kubernetes" / "base")["Deployment"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert pool["targetPorts"] == [{"number": ports["http"]}]


@pytest.mark.parametrize("name", ["kubernetes", "compose"])
def test_flags_and_ports(name: str) -> None:
    server = server_of(
        container()["args"] if name == "kubernetes" else compose()["services"]["jengine"]["command"]
    )
    assert (server.grpc_port, server.port, server.metrics_port) == (50051, 8000, 9090)
    if name == "kubernetes":
        assert {port["name"]: port["containerPort"] for port in container()["ports"]} == {
            "grpc": 50051,
            "http": 8000,
            "metrics": 9090,
        }
        ports = manifests()["Service"]["spec"]["ports"]
        assert {port["targetPort"]: port["port"] for port in ports} == {
            "grpc": 50051,
            "http": 8000,
            "metrics": 9090,
        }
        grace = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
        assert str(server.api_keys).startswith(mounts["keys"] + "/") and mounts["cache"] == "/cache"
    else:
        published = [port.split(":") for port in compose()["services"]["jengine"]["ports"]]
        assert published == [
            ["127.0.0.1", "8000", "8000"],
            ["127.0.0.1", "50051", "50051"],
        ], "without keys, for this machine only"
        grace = int(compose()["services"]["jengine"]["stop_grace_period"].removesuffix("s"))
    assert grace >= longest_stop(server), "it would be killed while it drains"


def test_probes_ask_for_what_there_is() -> None:
    pages = pages_of(Metrics(ModelMetrics("mock", lambda: MockEngine().load, lambda: 0)), lambda: None)
    probes = [container()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["port"] == "metrics" and probe["path"] in pages for probe in probes)
    [path] = re.findall(
        r"127\.0\.0\.1:9090(/\w+)", compose()["services"]["jengine"]["healthcheck"]["test"][-1]
    )
    assert path in pages


def test_labels_and_names_agree() -> None:
    every = manifests()
    template = every["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert every[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert every["Service"]["spec"]["selector"].items() <= labels.items()
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9090"
    assert (
        every["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == every["Deployment"]["metadata"]["name"]
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_whole(overlay: str) -> None:
    every = manifests(overlay)
    pod = every["Deployment"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert all(len(volume) == 2 for volume in volumes.values()), "a name and one source"
    assert {mount["name"] for mount in container(overlay)["volumeMounts"]} == volumes.keys()
    assert re.fullmatch(r"registry\.example\.com/jengine:[\w.-]+", container(overlay)["image"]), (
        "plainly the user's to set"
    )
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == 10001, "the image's user"
    assert security["fsGroupChangePolicy"] == "OnRootMismatch", (
        "otherwise each mount lets the group write saved programs"
    )
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(overlay)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {
        mount["mountPath"] for mount in container(overlay)["volumeMounts"] if not mount.get("readOnly")
    }
    assert writable == {"/cache", "/tmp"}
    shared = "persistentVolumeClaim" in volumes["cache"]
    assert shared == (overlay == "shared-cache") == ("PersistentVolumeClaim" in every)
    if shared:
        claim = every["PersistentVolumeClaim"]
        assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"], (
            "with another mode, the second node's pods would wait forever"
        )
    if overlay == "nvidia-gpu":
        assert container(overlay)["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_mounted_files_are_there() -> None:
    services = compose()["services"]
    sources = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert [name for name in sources if name.startswith("./") and not (DEPLOY / name).is_file()] == []
    assert {name for name in sources if not name.startswith("./")} == {*compose()["volumes"]}
    assert all(
        re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        for service in services.values()
        if "image" in service
    )
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    [job], [rules] = prometheus["scrape_configs"], prometheus["rule_files"]
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in services["prometheus"]["volumes"]
    assert (DEPLOY / rules).is_file(), "promtool checks it from its own folder"
    assert job["static_configs"] == [{"targets": ["jengine:9090"]}]
    [source] = yaml.safe_load((DEPLOY / "grafana" / "sources.yaml").read_text())["datasources"]
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert any(
        volume.split(":")[1].startswith(provider["options"]["path"])
        for volume in services["grafana"]["volumes"]
    )


def test_metrics_are_exported() -> None:
    """The autoscaler's, and all that the dashboard and the alerts show."""
    registry = CollectorRegistry()
    load = MockEngine().load._replace(decisions=(("throughput: most tokens a second", 1),))
    totals = StepTotals(steps={"8+1": 1}, seconds={"wait": 1.0})
    metrics = Metrics(ModelMetrics("mock", lambda: load, lambda: 0, lambda: totals))
    metrics.certificate_expiry = lambda: 2e9
    metrics.http_ended("POST", "/v1/completions", 200)
    metrics.rpc_ended("/jengine.v1.GenerateService/Generate", grpc.StatusCode.OK)
    metrics.rejected("queue_full")
    metrics.request_over("anna", "OK", 1, 1)
    registry.register(metrics)
    exported = {*re.findall(r"^([\w:]+)[{ ]", generate_latest(registry).decode(), re.MULTILINE)}
    board = json.loads((DEPLOY / "grafana" / "jengine.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for one in panel["targets"]
        for name in re.findall(r"(?:jengine:|http_)\w+", one["expr"])
    }
    assert len(shown) > 30 and shown <= exported, shown - exported
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    watched = {
        name
        for rule in rules
        for name in re.findall(r"(?:jengine:|http_|grpc_)[\w:]+(?=[{\[ ]|$)", rule["expr"])
    }
    codes = {"grpc_code"}
    assert len(watched) > 8 and watched - codes <= exported | recorded, watched - exported
    [scaled] = [
        one["pods"]["metric"]["name"] for one in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    ]
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    [rule] = adapter["rules"]["custom"]
    assert rule["name"]["as"] == scaled
    assert {*re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])} <= exported


def test_metrics_can_be_scraped_in_each_way() -> None:
    """By the pods' annotations, the Service, and the Prometheus operator."""
    every = manifests()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    pod = every["Deployment"]["spec"]["template"]["metadata"]
    assert pod["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    served = {port["name"]: port for port in every["Service"]["spec"]["ports"]}
    assert served["metrics"]["targetPort"] == "metrics" and served["metrics"]["port"] == ports["metrics"]
    monitor = kustomized(DEPLOY / "kubernetes" / "components" / "pod-monitor")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus's promtool (Debian: prometheus)"
)
def test_alerts() -> None:
    test = Path(__file__).parent / "alerts_test.yaml"
    for arguments in (
        ["check", "rules", str(DEPLOY / "alerts.yaml")],
        ["check", "config", str(DEPLOY / "prometheus.yaml")],
        ["test", "rules", str(test)],
    ):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


CHART = DEPLOY / "helm"


@pytest.mark.parametrize(
    ("overlay", "values"),
    [
        ("cpu", {}),
        ("nvidia-gpu", {"gpus": 1, "memory": "32Gi", "image": {"tag": f"{__version__}-cuda"}}),
        ("shared-cache", {"cache": {"persistent": True}}),
    ],
)
def test_the_chart_deploys_what_an_overlay_does(overlay: str, values: dict[str, Any]) -> None:
    assert rendered(CHART, "jengine", **values) == manifests(overlay)


def test_the_charts_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    names = {f"{name}.{part}" for name, parts in values.items() if isinstance(parts, dict) for part in parts}
    names |= {name for name, value in values.items() if not isinstance(value, dict) or not value}
    assert {*re.findall(r"\.Values\.([\w.]+)", templates)} == names
    every = rendered(
        CHART,
        "small",
        model="Qwen/Qwen3-0.6B",
        args=["--max-num-seqs=64"],
        env=[{"name": "JENGINE_SEED", "value": "1"}],
        apiKeysSecret="",
        nodeSelector={"disk": "fast"},
        autoscaler={"enabled": False},
        replicas=3,
        podMonitor={"enabled": True, "interval": "30s"},
        cache={"persistent": True, "size": "9Gi", "storageClass": "nfs"},
    )
    assert every.keys() == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "PodMonitor",
        "PersistentVolumeClaim",
    }
    assert {manifest["metadata"]["name"] for manifest in every.values()} == {"small", "small-cache"}
    pod = every["Deployment"]["spec"]["template"]["spec"]
    [server] = pod["containers"]
    config = server_of(server["args"])
    assert config.api_keys is None and "--max-num-seqs=64" in server["args"]
    assert {"name": "JENGINE_SEED", "value": "1"} in server["env"] and pod["nodeSelector"] == {"disk": "fast"}
    assert {volume["name"] for volume in pod["volumes"]} == {"cache", "tmp"}
    assert every["Deployment"]["spec"]["replicas"] == 3
    assert every["PersistentVolumeClaim"]["spec"]["storageClassName"] == "nfs"
    assert every["PodMonitor"]["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "interval": "30s"}]
    component = kustomized(DEPLOY / "kubernetes" / "components" / "pod-monitor")
    assert rendered(CHART, "jengine", podMonitor={"enabled": True})["PodMonitor"] == component["PodMonitor"]


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
@pytest.mark.parametrize("values", [{}, {"gpus": 1}, {"cache": {"persistent": True}, "args": ["--seed=1"]}])
def test_helm_renders_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = ["helm", "template", "jengine", str(CHART), "--values", str(tmp_path / "values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    every = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout) if manifest}
    assert every == rendered(CHART, "jengine", **values)


def test_the_systemd_unit() -> None:
    path = DEPLOY / "jengine.service"
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert command[:2] == ["/opt/jengine/bin/jengine", "serve"]
    server = server_of(command[2:])
    assert server.host in ("127.0.0.1", "localhost"), "without keys and TLS, for this machine only"
    assert int(service["TimeoutStopSec"]) >= longest_stop(server), "it would be killed while it drains"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID" and service["KillMode"] == "mixed"
    assert service["DynamicUser"] == "yes" and service["Restart"] == "on-failure"
    variables = dict(pair.split("=", 1) for pair in shlex.split(service["Environment"]))
    assert variables["JENGINE_CACHE_DIR"].startswith("%C/") and service["CacheDirectory"] == "jengine"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
        complaints = [line for line in done.stderr.splitlines() if "jengine.service" in line]
        # the checking machine has no such command
        assert [line for line in complaints if "is not executable" not in line] == []
