"""`jengine plan --devices`, from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jengine import EngineConfig, cli
from jengine.capacity.planning.layouts import ALIKE, choose
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.plan import plan_layouts
from jengine.capacity.planning.report import plain, report
from jengine.capacity.planning.traffic import Traffic
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = Path(__file__).parent.parent / "data"
LLAMA = EngineConfig(model=str(DATA / "llama-3.1-70b"), max_model_len=16384)


def plan(*flags: str) -> int:
    return cli.main(["plan", *flags])


def test_70b_on_eight_h200s(capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB of weights need two devices or more; more than that only adds sums to wait for."""
    model = str(DATA / "llama-3.1-70b")
    assert plan(model, "--target=h200", "--devices=8", "--target-tpot-ms=50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["layout"] for one in found["refused"]] == ["one device, 8 replicas"]
    assert found["refused"][0]["why"].startswith("does not fit: weights 13")
    best, *others = found["layouts"]
    assert (best["layout"], best["replicas"], best["why"]) == ("tensor 2, 4 replicas", 4, None)
    assert best["point"]["tpot"] <= 0.05 and best["memory"]["weights"] == 70_553_706_496 + 161 * 8192
    most = best["point"]["per_device"] / ALIKE  # an engine of fewer devices is taken if it is nearly as fast
    assert all(one["point"]["per_device"] <= most for one in others)
    assert "links in a host takes" in next(one["why"] for one in others if one["layout"] == "tensor 8")
    assert plan(model, "--target=h200", "--devices=8", "--target-tpot-ms=2") == 1
    said = capsys.readouterr().out
    assert "No layout serves this traffic within its targets." in said
    assert "misses the targets even with one sequence" in said


def test_a_quarter_of_deepseek_v3_on_two_hosts(tmp_path: Path) -> None:
    """Tensor parallelism keeps a copy of every cached vector on each device; data ranks do not."""
    fields = json.loads((DATA / "deepseek-v3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 16}))
    config = EngineConfig(model=str(tmp_path), max_model_len=16384)
    cluster = Cluster.of(device_spec("h200"), 4, hosts=2)
    choice = choose(config, cluster, Traffic(prompt=8192, output=1024, tpot_ms=50.0))
    assert choice.best is not None and choice.best.deployment.layout.data >= 2
    by_layout = {one.deployment.layout: one for one in choice.candidates}
    tensor, data = by_layout[Layout(tensor=4)], by_layout[Layout(data=4, expert_parallel=True)]
    assert (tensor.copies, data.copies) == (4, 1) and data.serving.fits > 2 * tensor.serving.fits
    assert "a cached token lies on 4 devices" in choice.why(tensor)
    assert data.memory.weights > tensor.memory.weights
    assert choice.refused and all(one.replicas > 1 for one, _ in choice.refused)
    assert all("does not fit: weights" in why for _, why in choice.refused)
    text = report("V3", plan_layouts(choice))
    assert "4 x NVIDIA H200 on 2 hosts: weights float8_e4m3fn, activations bfloat16, cache" in text
    assert "jengine does not take data_parallel_size with num_processes yet." in text
    crossing = [one for one in plain(plan_layouts(choice))["layouts"] if "stages x data" in one["layout"]]
    assert crossing and all(one["flags"] is None for one in crossing)
    assert "50 GB/s between hosts" in text
    assert json.loads(json.dumps(plain(plan_layouts(choice))))["verdict"] == choice.verdict


def test_traffic_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"jengine_trace": 1}]
    rows += [{"arrival": i / 10, "prompt_tokens": 200, "output_tokens": 20} for i in range(40)]  # type: ignore[dict-item]
    trace, model = tmp_path / "trace.jsonl", str(DATA / "llama-3.1-8b")
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--target=l4", "--devices=2", f"--traffic={trace}", "--max-model-len=2048", "--max-num-seqs=32"]
    assert plan(model, *flags) == 0
    assert "prompts of 200 tokens, outputs of 20" in capsys.readouterr().out


def test_flags_that_need_devices(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "llama-3.1-8b")
    for flags, said in (
        (["--target=h200", "--traffic=1/1"], "traffic='1/1': needs --devices"),
        (["--target=h200", "--devices=0"], "devices=0: must be from 1 to 1024"),
        (["--target=h200", "--devices=2", "--exact"], "exact=True: cannot be combined with --devices"),
        (
            ["--devices=2", "--target=h200", "--traffic=many"],
            "traffic='many': must be tokens of prompts and outputs",
        ),
        (
            ["--devices=2", "--target=h200", "--traffic=90000/90000"],
            "must be at most 131,072 tokens together",
        ),
        (["--devices=3", "--target=h200", "--tensor-parallel-size=2"], "devices=3: must be a multiple of 2"),
        (["--devices=16", "--target=l4"], "network=None: must be given"),
        (
            ["--devices=2", "--target=h200", "--target-tpot-ms=0"],
            "target_tpot_ms=0.0: must be a number of milliseconds above 0",
        ),
    ):
        assert plan(model, *flags) == 2
        assert said in capsys.readouterr().err
    assert (
        plan(model, "--devices=16", "--target=l4", "--network=12.5GB/s", "--link=10GB/s", "--traffic=500/500")
        == 0
    )
    assert "10 GB/s in a host (PCIe 4 x16, given), 12 GB/s between hosts (given)" in " ".join(
        capsys.readouterr().out.split()
    )
