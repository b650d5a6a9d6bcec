"""`jengine plan --devices` and `jengine simulate --devices`, from configurations alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import EngineConfig, cli
from jengine.capacity.layouts.choice import choose
from jengine.capacity.layouts.links import Cluster
from jengine.capacity.layouts.replays import replayed, shape_of, slopes_of
from jengine.capacity.layouts.report import frontier, plain, report, save_plot
from jengine.capacity.layouts.serving import Traffic
from jengine.capacity.simulation.summary import Targets
from jengine.capacity.simulation.trace import make_trace
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = Path(__file__).parent.parent / "data"
LLAMA = EngineConfig(model=str(DATA / "llama-3.1-70b"), max_model_len=16384)


def plan(*flags: str) -> int:
    return cli.main(["plan", *flags])


def test_70b_on_eight_h200s(capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB of weights need two devices or more; more than that only adds sums to wait for."""
    model = str(DATA / "llama-3.1-70b")
    assert plan(model, "--devices=8xH200", "--target-tpot-ms=50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["layout"] for one in found["refused"]] == ["one device, 8 replicas"]
    assert found["refused"][0]["why"].startswith("does not fit: weights 13")
    best, *others = found["layouts"]
    assert (best["layout"], best["replicas"], best["why"]) == ("tensor 2, 4 replicas", 4, None)
    assert best["point"]["tpot"] <= 0.05 and best["memory"]["weights"] == 70_553_706_496 + 161 * 8192
    assert all(one["point"]["per_device"] <= best["point"]["per_device"] for one in others)
    assert "links in a host takes" in next(one["why"] for one in others if one["layout"] == "tensor 8")
    assert plan(model, "--devices=8xH200", "--target-tpot-ms=2") == 1
    said = capsys.readouterr().out
    assert "No layout serves this traffic within its targets." in said
    assert "misses the targets even with one sequence" in said


def test_a_quarter_of_deepseek_v3_on_two_hosts(tmp_path: Path) -> None:
    """Tensor parallelism keeps a copy of every cached vector on each device; data ranks do not."""
    fields = json.loads((DATA / "deepseek-v3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 16}))
    config = EngineConfig(model=str(tmp_path), max_model_len=16384)
    cluster = Cluster.of(device_spec("h200"), 4, hosts=2)
    choice = choose(config, "V3", cluster, Traffic(prompt=8192, output=1024, tpot_ms=50.0))
    assert choice.best is not None and choice.best.deployment.layout.data >= 2
    by_layout = {one.deployment.layout: one for one in choice.candidates}
    tensor, data = by_layout[Layout(tensor=4)], by_layout[Layout(data=4, expert_parallel=True)]
    assert (tensor.copies, data.copies) == (4, 1) and data.serving.fits > 2 * tensor.serving.fits
    assert "a cached token lies on 4 devices" in choice.why(tensor)
    assert data.memory.experts == tensor.memory.experts and data.memory.weights > 2 * tensor.memory.weights
    assert choice.refused and all(one.replicas > 1 for one, _ in choice.refused)
    assert all("does not fit: experts" in why for _, why in choice.refused)
    text = report(choice)
    assert "4 x NVIDIA H200 on 2 hosts: weights float8_e4m3fn, cache bfloat16" in text
    assert "jengine does not take data_parallel_size with num_processes yet." in text
    crossing = [one for one in plain(choice)["layouts"] if "stages x data" in one["layout"]]
    assert crossing and all(one["flags"] is None for one in crossing)
    assert "50 GB/s between hosts" in text
    assert json.loads(json.dumps(plain(choice)))["verdict"] == choice.verdict
    save_plot(tmp_path / "plot.png", choice)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    points = frontier([point for one in choice.candidates for point in one.serving.points()])
    assert all(a.tpot < b.tpot and a.per_device < b.per_device for a, b in pairwise(points))


def test_a_simulation_agrees_with_the_plan() -> None:
    """The real scheduler, with requests of many lengths that end at different times, reaches the planned
    throughput but for the beginning and the end of the trace.
    """
    traffic = Traffic(prompt=512, output=256, tpot_ms=40.0)
    choice = choose(LLAMA, "70B", Cluster.of(device_spec("h200"), 2), traffic)
    assert [str(one.deployment) for one in choice.candidates] == ["tensor 2", "2 stages"]
    random = np.random.default_rng(0)
    lengths = random.uniform(0.5, 1.5, (1000, 2)) * [512, 256]
    trace = make_trace([(0.0, int(prompt), int(output)) for prompt, output in lengths])
    [tensor, _] = choice.candidates
    assert tensor.best is not None
    done = replayed(LLAMA, tensor, trace, Targets())
    assert 0.8 * tensor.throughput < done.per_device < 1.1 * tensor.throughput
    assert done.summary.per_token[50] == pytest.approx(tensor.best.tpot, rel=0.1)
    shape, own = shape_of(LLAMA, tensor), tensor.serving.costs
    assert shape.max_num_seqs == tensor.best.sequences and shape.num_pages == 1 + tensor.memory.pages
    assert shape.costs.slopes == slopes_of(own)
    slopes = slopes_of(own)  # 163,840 bytes on each of two devices; 64 heads of 128, in 80 layers
    assert slopes.context == pytest.approx(163_840 / 4.8e12)
    assert slopes.attended == pytest.approx(4 * 64 * 128 * 80 / 2 / 989.5e12)


def test_simulate_compares_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"jengine_trace": 1}]
    rows += [{"arrival": i / 10, "prompt_tokens": 200, "output_tokens": 20} for i in range(40)]  # type: ignore[dict-item]
    trace, model = tmp_path / "trace.jsonl", str(DATA / "llama-3.1-8b")
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = [model, str(trace), "--devices=2xL4", "--quiet", "--max-model-len=2048", "--max-num-seqs=32"]
    assert cli.main(["simulate", *flags, "--layouts=auto", "--target-ttft-ms=1000", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {one["layout"] for one in found} == {"tensor 2", "2 stages", "one device, 2 replicas"}
    assert all(one["unanswered"] == 0 and one["in_target"] > 0.9 for one in found)
    assert cli.main(["simulate", *flags, "--tensor-parallel-size=2"]) == 0
    said = capsys.readouterr().out
    assert "tensor 2:\n40 requests" in said and "replicas" not in said
    assert plan(model, "--devices=2xL4", f"--traffic={trace}", *flags[4:]) == 0
    assert "prompts of 200 tokens, outputs of 20" in capsys.readouterr().out


def test_flags_that_need_devices(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "llama-3.1-8b")
    for flags, said in (
        (["--target=h200", "--traffic=1/1"], "traffic='1/1': needs --devices"),
        (["--target=h200", "--devices=2xH200"], "target='h200': cannot be combined with --devices"),
        (["--devices=2xH200", "--traffic=many"], "traffic='many': must be tokens of prompts and outputs"),
        (["--devices=2xH200", "--traffic=90000/90000"], "must be at most 131,072 tokens together"),
        (["--devices=3xH200", "--tensor-parallel-size=2"], "devices=3: must be a multiple of 2"),
        (["--devices=16xL4"], "network=None: must be given"),
        (
            ["--devices=2xH200", "--target-tpot-ms=0"],
            "target_tpot_ms=0.0: must be a number of milliseconds above 0",
        ),
    ):
        assert plan(model, *flags) == 2
        assert said in capsys.readouterr().err
    assert plan(model, "--devices=16xL4", "--network=12.5GB/s", "--link=10GB/s", "--traffic=500/500") == 0
    assert "10 GB/s in a host (PCIe 4 x16, given), 12 GB/s between hosts (given)" in " ".join(
        capsys.readouterr().out.split()
    )
    for flag in ("--layouts=2", "--hosts=2"):
        assert cli.main(["simulate", model, "trace", flag]) == 2
        assert "needs --devices" in capsys.readouterr().err
